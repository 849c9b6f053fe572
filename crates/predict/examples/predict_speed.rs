//! How long a prediction takes: `cargo run --release -p nobounce-topology --example predict_speed`.

use std::hint::black_box;
use std::time::Instant;

use nobounce_predict::machine::{Choice, parts_of};
use nobounce_predict::model::direct;
use nobounce_predict::report::report;
use nobounce_topology::machines;

fn main() {
    let facts = machines::machine("dgx-h100").expect("a known machine");
    let parts = parts_of(&facts, &Choice::default()).expect("its parts").spec.resolve().expect("they fit");
    let time = |rounds: u32, what: &mut dyn FnMut()| {
        let start = Instant::now();
        (0..rounds).for_each(|_| what());
        start.elapsed().as_secs_f64() * 1e6 / f64::from(rounds)
    };
    let one = time(100_000, &mut || {
        let _ = black_box(direct(black_box(&parts), 1 << 20));
    });
    let sizes: Vec<u64> = (0..=30).map(|power| 1 << power).collect();
    let all = time(1000, &mut || {
        let _ = black_box(report("speed", black_box(&parts), &sizes));
    });
    println!("one size, direct: {one:.2} us; a whole report of {} sizes: {all:.0} us", sizes.len());
}
