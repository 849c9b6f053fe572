//! The simulator against published results.
//!
//! - The fluid model of DCQCN (Zhu et al., SIGCOMM 2015, section 5): the queue at a 40 Gb/s
//!   bottleneck as a function of the number of flows.
//! - Permutation traffic over several paths (Raiciu et al., SIGCOMM 2011): utilisation as a
//!   function of the number of subflows.

use nobounce_fabric::control::DcqcnOptions;
use nobounce_fabric::units::{MICROSECOND, MILLISECOND, NANOSECOND};
use nobounce_fabric::{Algorithm, Config, Fabric, Report, Switch, Workload, run};

const LINE_GBITS: f64 = 40.0;
const KMIN: f64 = 5_000.0;
const KMAX: f64 = 200_000.0;
const PMAX: f64 = 0.01;

/// K senders at 40 Gb/s with the parameters of the paper.
fn incast(senders: usize) -> Report {
    let mut fabric = Fabric::single_switch(senders + 1, LINE_GBITS);
    fabric.link_delay = 500 * NANOSECOND;
    fabric.host_delay = MICROSECOND;
    fabric.switch = Switch { ecn_min: 5_000, ecn_max: 200_000, ecn_probability: PMAX, ..fabric.switch };
    let mut config = Config::new(fabric, 200 * MILLISECOND);
    config.transport.control = Algorithm::Dcqcn;
    config.transport.mtu = 1024;
    config.sample_every = 20 * MICROSECOND;
    run(config, &Workload::Incast { senders, message: 4 << 20, short: 0, short_load: 0.0 }).unwrap()
}

/// Queues of the second half of a run, ascending: senders have converged by then.
fn settled(report: &Report) -> Vec<f64> {
    let mut queues: Vec<f64> =
        report.samples[report.samples.len() / 2..].iter().map(|sample| sample.deepest_queue as f64).collect();
    queues.sort_by(f64::total_cmp);
    queues
}

/// The queue of the fluid model over time, in bytes, after its first half: equations 3 to 9 of the
/// paper, integrated in steps of a microsecond from the fair share, with 4 us of feedback delay
/// besides the queue's own.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a delay in steps")]
fn fluid(flows: f64) -> Vec<f64> {
    let options = DcqcnOptions::default();
    let (packet, step) = (1024.0, 1e-6);
    let line = LINE_GBITS * 1e9 / 8.0 / packet;
    let (tau, timer, bytes) = (50e-6, 55e-6, options.byte_counter / packet);
    let (steps, additive) = (f64::from(options.recovery_steps), options.additive * 1e9 / 8.0 / packet);
    let (mut alpha, mut current, mut target, mut queue) = (0.1, line / flows, line / flows, 0.0_f64);
    let mut past: Vec<(f64, f64)> = Vec::new();
    let mut queues = Vec::new();
    for _ in 0..100_000 {
        let delay = 4 + (queue / line / step) as usize;
        let (marked, rate) = past.len().checked_sub(delay).map_or((1e-12, current), |at| past[at]);
        let marked = marked.clamp(1e-12, 1.0 - 1e-12);
        // Chance that none of so many packets is marked, and increases per packet by a counter that
        // a mark resets.
        let kept = |packets: f64| (packets * (-marked).ln_1p()).exp();
        let raises = |packets: f64| marked * kept(packets) / (1.0 - kept(packets));
        let (by_bytes, by_time) = (raises(bytes), raises(timer * rate));
        let cut = 1.0 - kept(tau * rate);
        let further = kept(steps * bytes) * by_bytes + kept(steps * timer * rate) * by_time;
        let gap = target - current;
        alpha += step * options.g / timer * (1.0 - kept(timer * rate) - alpha);
        target = (target + step * (additive * rate * further - gap / tau * cut)).min(line);
        let recovery = gap / 2.0 * rate * (by_bytes + by_time);
        current = (current + step * (recovery - current * alpha / (2.0 * tau) * cut)).min(line);
        queue = (queue + step * (flows * current - line)).max(0.0);
        let depth = queue * packet;
        let share = if depth > KMAX { 1.0 } else { ((depth - KMIN) / (KMAX - KMIN) * PMAX).max(0.0) };
        past.push((share, current));
        queues.push(depth);
    }
    let mut settled = queues.split_off(queues.len() / 2);
    settled.sort_by(f64::total_cmp);
    settled
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn p90(values: &[f64]) -> f64 {
    values[values.len() * 9 / 10]
}

/// With few flows the model is at rest on a queue that grows with their number; single
/// notifications make the simulated queue swing around it, and rest higher. With ten flows and
/// more, both swing between an empty queue and the threshold above which everything is marked.
#[test]
fn queues_of_dcqcn_follow_its_fluid_model() {
    let mut previous = 0.0;
    for (flows, mean_error, p90_error) in
        [(2, 0.5, f64::INFINITY), (4, 0.5, f64::INFINITY), (10, 0.2, 0.1), (16, 0.2, 0.1), (20, 0.2, 0.1)]
    {
        let (simulated, model) = (settled(&incast(flows)), fluid(flows as f64));
        let errors = (mean(&simulated) / mean(&model) - 1.0, p90(&simulated) / p90(&model) - 1.0);
        println!(
            "{flows} flows: mean {:.0} B ({:+.0} %), 90th percentile {:.0} B ({:+.0} %)",
            mean(&simulated),
            100.0 * errors.0,
            p90(&simulated),
            100.0 * errors.1,
        );
        assert!(errors.0.abs() < mean_error && errors.1.abs() < p90_error, "{flows} flows: {errors:?}");
        assert!(p90(&simulated) > previous, "the queue grows with the number of flows");
        previous = p90(&simulated);
    }
}

/// Permutation traffic in a non-blocking fabric of 128 hosts, after Raiciu et al., SIGCOMM 2011:
/// with one path for each flow utilisation is below 50 %, and eight subflows bring it to 90 %.
/// Their fabric is a fat tree of three tiers; two tiers leave fewer links to collide on.
#[test]
fn subflows_fill_a_fabric_that_single_paths_leave_half_empty() {
    let utilisation = [1, 2, 8].map(|ports| {
        let mut config = Config::new(Fabric::leaf_spine(128, 8, 100.0), 2 * MILLISECOND);
        config.transport.ports = ports;
        let report = run(config, &Workload::Permutation { message: 1 << 20 }).unwrap();
        // Of the payload that a full link carries.
        report.goodput * (4096.0 + 82.0) / 4096.0
    });
    println!("1, 2 and 8 paths: {utilisation:.3?}, published: below 0.5, -, 0.9");
    assert!(utilisation.is_sorted());
    assert!((0.4..0.55).contains(&utilisation[0]), "{utilisation:?}");
    assert!((utilisation[2] / 0.9 - 1.0).abs() < 0.1, "{utilisation:?}");
}
