//! Files in JSON or YAML, as engines read them: JSON is read as YAML, and a key given twice is an
//! error.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle};
use serde_json::{Map, Value};

/// Limits that no file of a vendor reaches; aliases could make a small file a large one.
const MOST_LEVELS: usize = 32;
const MOST_VALUES: usize = 100_000;

/// A mapping or sequence that is not complete.
struct Level {
    anchor: usize,
    kind: YamlKind,
}

enum YamlKind {
    /// The key whose value comes next; None where a key comes next.
    Mapping(Map<String, Value>, Option<String>),
    Sequence(Vec<Value>),
}

#[derive(Default)]
struct Builder {
    levels: Vec<Level>,
    anchors: HashMap<usize, Value>,
    values: usize,
    whole: Option<Value>,
}

/// The first document of the text. Null fields are left out, since engines take them for missing.
pub(super) fn parse(text: &str) -> Result<Value, String> {
    let mut builder = Builder::default();
    for event in Parser::new_from_str(text) {
        let (event, _) = event.map_err(|error| error.to_string())?;
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let is_plain = style == ScalarStyle::Plain && tag.is_none();
                builder.scalar(&text, is_plain, anchor)?;
            }
            Event::Alias(anchor) => {
                let value = builder.anchors.get(&anchor).cloned().ok_or("an alias without an anchor")?;
                builder.count(values_of(&value))?;
                builder.add(value, 0)?;
            }
            Event::MappingStart(anchor, _) => builder.start(anchor, YamlKind::Mapping(Map::new(), None))?,
            Event::SequenceStart(anchor, _) => builder.start(anchor, YamlKind::Sequence(Vec::new()))?,
            Event::MappingEnd | Event::SequenceEnd => {
                let Some(Level { anchor, kind }) = builder.levels.pop() else { continue };
                let value = match kind {
                    YamlKind::Mapping(fields, _) => Value::Object(fields),
                    YamlKind::Sequence(items) => Value::Array(items),
                };
                builder.add(value, anchor)?;
            }
            Event::DocumentEnd => break,
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart(_) => {}
        }
    }
    builder.whole.ok_or_else(|| "it is empty".to_owned())
}

impl Builder {
    fn start(&mut self, anchor: usize, kind: YamlKind) -> Result<(), String> {
        if self.levels.len() == MOST_LEVELS {
            return Err(format!("more than {MOST_LEVELS} levels"));
        }
        self.levels.push(Level { anchor, kind });
        Ok(())
    }

    fn scalar(&mut self, text: &str, is_plain: bool, anchor: usize) -> Result<(), String> {
        if let Some(Level { kind: YamlKind::Mapping(fields, key @ None), .. }) = self.levels.last_mut() {
            if fields.contains_key(text) {
                return Err(format!("{text:?} is given twice"));
            }
            *key = Some(text.to_owned());
            return Ok(());
        }
        self.add(if is_plain { plain(text) } else { text.into() }, anchor)
    }

    fn count(&mut self, values: usize) -> Result<(), String> {
        self.values += values;
        if self.values > MOST_VALUES { Err(format!("more than {MOST_VALUES} values")) } else { Ok(()) }
    }

    fn add(&mut self, value: Value, anchor: usize) -> Result<(), String> {
        self.count(1)?;
        if anchor != 0 {
            self.anchors.insert(anchor, value.clone());
        }
        match self.levels.last_mut().map(|level| &mut level.kind) {
            None => self.whole = Some(value),
            Some(YamlKind::Sequence(items)) => items.push(value),
            Some(YamlKind::Mapping(fields, key)) => match key.take() {
                Some(key) if value.is_null() => drop(key),
                Some(key) => drop(fields.insert(key, value)),
                None => return Err("a key that is no text".to_owned()),
            },
        }
        Ok(())
    }
}

fn values_of(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(values_of).sum::<usize>(),
        Value::Object(fields) => 1 + fields.values().map(values_of).sum::<usize>(),
        _ => 1,
    }
}

/// A scalar without quotation marks.
fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" => return true.into(),
        "false" | "False" | "FALSE" => return false.into(),
        _ => {}
    }
    let based = [("0x", 16), ("0o", 8), ("0", 8)];
    let based = based.iter().find_map(|(start, base)| {
        let digits =
            text.strip_prefix(start).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
        i64::from_str_radix(digits, *base).ok()
    });
    let decimal = || text.parse::<i64>().ok();
    let is_number = text.starts_with(|first: char| first.is_ascii_digit() || "+-.".contains(first));
    let fraction = || text.parse::<f64>().ok().filter(|_| is_number).and_then(serde_json::Number::from_f64);
    match based.or_else(decimal) {
        Some(number) => number.into(),
        None => fraction().map_or_else(|| text.into(), Value::Number),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_and_yaml_give_the_same() {
        let wanted = json!({ "a": ["b", 1, true, { "c": "0x10" }], "d": {}, "e": 420, "f": "1.2.3" });
        assert_eq!(parse(&wanted.to_string()).unwrap(), wanted);
        let yaml =
            "---\na:\n- b\n- 1\n- true\n- {c: '0x10'}\nd: {}\ne: 0644\nf: 1.2.3\ng: null\n---\nsecond: 1\n";
        assert_eq!(parse(yaml).unwrap(), wanted);
        assert_eq!(parse("a: &x [1.5]\nb: *x\n").unwrap(), json!({ "a": [1.5], "b": [1.5] }));
    }

    #[test]
    fn what_engines_refuse_is_an_error() {
        for (text, part) in [
            ("{\"a\": 1, \"a\": 2}", "given twice"),
            ("a: b: c", "mapping"),
            ("", "empty"),
            ("[[1]", ""),
            ("? [a]\n: b", "no text"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
        assert!(parse(&"[".repeat(100)).unwrap_err().contains("levels"));
        let mut bomb = "a0: &a0 [x]\n".to_owned();
        for level in 1..40 {
            bomb += &format!("a{level}: &a{level} [*a{0}, *a{0}, *a{0}, *a{0}]\n", level - 1);
        }
        assert!(parse(&bomb).unwrap_err().contains("values"));
    }
}
