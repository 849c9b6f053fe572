//! Published figures against the model: docs/measurements/predict-published.txt, and the intervals.

use std::fmt::Write as _;
use std::sync::LazyLock;

use nobounce_predict::constants;
use nobounce_predict::fitted::Fitted;
use nobounce_predict::published::rows;
use nobounce_predict::report::{bytes, figure};
use nobounce_predict::validation::{Validation, validate};

static FOUND: LazyLock<Validation> = LazyLock::new(validate);

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The constants of the code are those that all sources choose.
#[test]
fn fitted_constants_are_what_the_fit_finds() {
    println!("{}", FOUND.score.text());
    assert_eq!(FOUND.fitted, Fitted::default());
}

#[test]
fn the_score_does_not_fall() {
    let score = &FOUND.score;
    assert!(score.within >= 0.70, "{score:?}");
    assert!(score.inside >= 0.85, "{score:?}");
    assert!(score.median_error <= 0.10, "{score:?}");
    assert!(score.binds_right >= 0.80, "{score:?}");
}

/// A row is left out for a reason only: a setting that its source does not state, no options, or
/// no prediction.
#[test]
fn rows_that_are_not_scored_say_why() {
    for row in rows() {
        assert!(!row.source.is_empty(), "{} has no source", row.id);
        assert!(row.assumes.is_empty() || !row.note.is_empty(), "{} is not explained", row.id);
    }
    for point in FOUND.points.iter().filter(|point| point.predicted.is_none()) {
        assert!(!point.unscored.is_empty(), "{point:?}");
    }
}

/// A default of the model in the place of a setting that decides and that the source does not state
/// is an assumption.
#[test]
fn settings_that_decide_are_stated_or_assumed() {
    for row in rows().iter().filter(|row| row.inexpressible.is_none()) {
        for (what, lacks) in
            [("distance", row.lacks_distance()), ("mtu", row.lacks_mtu()), ("platform", row.lacks_platform())]
        {
            let is_assumed = row.assumes.iter().any(|one| one == what);
            assert!(
                !lacks || is_assumed,
                "{}, {}: the {what} is neither stated nor assumed",
                row.id,
                row.what
            );
        }
    }
}

/// The constants of docs/reference/predict-model.md, the figures of
/// docs/measurements/predict-published.txt and the intervals of the code are these;
/// `NOBOUNCE_WRITE_DOCS=1` writes them.
#[test]
fn the_tables_are_what_the_model_says() {
    let model = format!("{ROOT}/../../docs/reference/predict-model.md");
    let mut page = std::fs::read_to_string(&model).unwrap();
    place(&mut page, "constants", &constants_table());
    place(&mut page, "score", &format!("```text\n{}```\n", FOUND.score.text()));
    for (path, now) in [
        (model, page),
        (format!("{ROOT}/../../docs/measurements/predict-published.txt"), points_table()),
        (format!("{ROOT}/src/interval_table.rs"), interval_table()),
    ] {
        if std::env::var_os("NOBOUNCE_WRITE_DOCS").is_some() {
            std::fs::write(path, now).unwrap();
        } else {
            let before = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(
                before == now,
                "{path} is not what the model says: run this test with NOBOUNCE_WRITE_DOCS=1"
            );
        }
    }
}

fn place(page: &mut String, name: &str, text: &str) {
    let (start, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->"));
    let from = page.find(&start).expect("the page has a place for the table") + start.len();
    let to = page.find(&end).expect("the place has an end");
    page.replace_range(from..to, text);
}

fn points_table() -> String {
    let mut text = format!(
        "{}\n| row | what | source | size | predicted | interval | measured | error | |\n|---|---|---|---:|---:|---:|---:|---:|---|\n",
        FOUND.score.text()
    );
    for one in &FOUND.points {
        let unit = one.unit;
        let least = if one.at_least { "> " } else { "" };
        let head = format!("| {} | {} | {} | {} |", one.row, one.what, one.source, bytes(one.size));
        let measured = format!("{least}{} {unit}", figure(one.measured));
        let Some(said) = &one.predicted else {
            let _ = writeln!(text, "{head} - | - | {measured} | - | {} |", one.unscored);
            continue;
        };
        let mut marks = Vec::new();
        if !one.unscored.is_empty() {
            marks.push(one.unscored.as_str());
        } else {
            if !said.within {
                marks.push("out of bounds");
            }
            if !said.inside {
                marks.push("outside the interval");
            }
            if said.binds_right == Some(false) {
                marks.push("another factor");
            }
        }
        let (low, high) = said.interval;
        let _ = writeln!(
            text,
            "{head} {} {unit} | {} - {} | {measured} | {:+.1} % | {} |",
            figure(said.expected),
            figure(low),
            figure(high),
            said.error * 100.0,
            marks.join(", ")
        );
    }
    text
}

fn interval_table() -> String {
    let mut text = String::from(
        "//! Made by the test of tests/published.rs from the published figures.\n\n\
         /// Quotients of measured and predicted times by class and length.\n\
         pub(super) const TABLE: [[(f64, f64); 3]; 5] = [\n",
    );
    for class in &FOUND.table {
        let row: Vec<String> = class.iter().map(|(low, high)| format!("({low:?}, {high:?})")).collect();
        let _ = writeln!(text, "    [{}],", row.join(", "));
    }
    text.push_str("];\n");
    text
}

fn constants_table() -> String {
    let mut text = String::from("| constant | value | from |\n|---|---:|---|\n");
    for one in constants::ALL {
        let kind = if one.fitted { "**fitted** to " } else { "" };
        let _ = writeln!(
            text,
            "| {} | {} {} | {kind}{} |",
            one.name.to_lowercase(),
            one.value,
            one.unit,
            one.source
        );
    }
    text
}
