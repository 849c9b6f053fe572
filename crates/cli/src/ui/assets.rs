//! The files of the page, and the page as one file.

use serde_json::Value;

pub(super) const HTML: &str = include_str!("page/index.html");
pub(super) const STYLE: &str = include_str!("page/page.css");

/// The modules of the script: each imports from earlier ones only.
const MODULES: [&str; 10] = [
    include_str!("page/util.js"),
    include_str!("page/tree.js"),
    include_str!("page/chart.js"),
    include_str!("page/machine.js"),
    include_str!("page/findings.js"),
    include_str!("page/cluster.js"),
    include_str!("page/expect.js"),
    include_str!("page/measured.js"),
    include_str!("page/live.js"),
    include_str!("page/page.js"),
];

/// Headers of every answer: nothing from elsewhere is loaded or run, and nothing is kept.
pub(super) const HEADERS: &str = "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; \
     connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
     require-trusted-types-for 'script'; trusted-types 'none'\r\nX-Content-Type-Options: nosniff\r\n\
     Referrer-Policy: no-referrer\r\nCache-Control: no-store\r\n";

/// The modules as one: imports and exports have no meaning within a file.
pub(super) fn script() -> String {
    let lines = MODULES.iter().flat_map(|module| module.lines()).filter(|line| !line.starts_with("import "));
    lines.map(|line| format!("{}\n", line.strip_prefix("export ").unwrap_or(line))).collect()
}

/// The page with its data, in one file. The nonce lets its own script run and no other.
pub(super) fn report(data: &Value, nonce: &str) -> String {
    let policy = format!(
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'nonce-{nonce}'; \
         style-src 'nonce-{nonce}'; img-src data:; base-uri 'none'; form-action 'none'; \
         require-trusted-types-for 'script'; trusted-types 'none'\">"
    );
    // "<" would end the element, as in "</script>".
    let json = data.to_string().replace('<', "\\u003c");
    let data = format!("<script type=\"application/json\" id=\"embedded\">{json}</script>");
    let style = format!("<style nonce=\"{nonce}\">{STYLE}</style>");
    let script = format!("<script type=\"module\" nonce=\"{nonce}\">{}</script>", script());
    let page = HTML.replace("<!--CSP-->", &policy);
    let page = between(&page, "<!--STYLE-->", "<!--/STYLE-->", &style);
    let page = between(&page, "<!--SCRIPT-->", "<!--/SCRIPT-->", &script);
    page.replace("<!--DATA-->", &data)
}

/// The text with what is between two marks, and the marks, replaced.
fn between(text: &str, from: &str, to: &str, new: &str) -> String {
    match (text.find(from), text.find(to)) {
        (Some(start), Some(end)) => [&text[..start], new, &text[end + to.len()..]].concat(),
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_small_and_needs_nothing_else() {
        let script = script();
        assert!(!script.contains("\nimport ") && !script.contains("\nexport "));
        let all = HTML.len() + STYLE.len() + script.len();
        assert!(all < 300_000, "{all} bytes");
        for text in [HTML, STYLE, &script] {
            let outside = text.matches("http").count()
                - text.matches("http://www.w3.org").count()
                - text.matches("http-equiv").count();
            assert_eq!(outside, 0, "names of other hosts");
        }
    }

    #[test]
    fn data_of_a_report_cannot_end_its_element() {
        let page = report(&serde_json::json!({ "name": "</script><script>alert(1)</script>" }), "n0");
        assert!(!page.contains("alert(1)</script>") && page.contains("\\u003c/script>"));
        for mark in ["<!--CSP-->", "<!--STYLE-->", "<!--DATA-->", "<!--SCRIPT-->"] {
            assert!(!page.contains(mark), "{mark}");
        }
        assert!(!page.contains("page.css") && !page.contains("src=\"page.js\""));
    }
}
