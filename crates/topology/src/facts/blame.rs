//! Which field of a facts file is at fault.

use serde_json::Value;

use super::Facts;

/// The deepest field without which the file reads differently: `nics[3].ports[0].rate_gbps`. `None`
/// if the file is fine, or if a field is missing.
pub(super) fn field(raw: &Value) -> Option<String> {
    let told = |value: Value| serde_json::from_value::<Facts>(value).err().map(|error| error.to_string());
    let before = told(raw.clone())?;
    let mut path: Vec<Step> = Vec::new();
    loop {
        let here = at(raw, &path)?;
        let culprit = steps(here).into_iter().find(|step| {
            let mut less = raw.clone();
            let mut longer = path.clone();
            longer.push(step.clone());
            remove(&mut less, &longer);
            told(less).as_ref() != Some(&before)
        });
        match culprit {
            Some(step) => path.push(step),
            None => break,
        }
    }
    let mut text = String::new();
    for step in &path {
        match step {
            Step::Field(name) if text.is_empty() => text.push_str(name),
            Step::Field(name) => text.extend([".", name]),
            Step::Element(index) => text.push_str(&format!("[{index}]")),
        }
    }
    (!text.is_empty()).then_some(text)
}

/// One step into a value.
#[derive(Clone, Debug)]
enum Step {
    Field(String),
    Element(usize),
}

fn steps(value: &Value) -> Vec<Step> {
    match value {
        Value::Object(fields) => fields.keys().cloned().map(Step::Field).collect(),
        Value::Array(items) => (0..items.len()).map(Step::Element).collect(),
        _ => Vec::new(),
    }
}

fn at<'a>(raw: &'a Value, path: &[Step]) -> Option<&'a Value> {
    path.iter().try_fold(raw, |value, step| match step {
        Step::Field(name) => value.get(name),
        Step::Element(index) => value.get(index),
    })
}

fn remove(raw: &mut Value, path: &[Step]) {
    let Some((last, front)) = path.split_last() else { return };
    let holder = front.iter().try_fold(raw, |value, step| match step {
        Step::Field(name) => value.get_mut(name),
        Step::Element(index) => value.get_mut(index),
    });
    match (holder, last) {
        (Some(Value::Object(fields)), Step::Field(name)) => {
            fields.remove(name);
        }
        (Some(Value::Array(items)), Step::Element(index)) if *index < items.len() => {
            items.remove(*index);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Facts, FactsError};
    use crate::machines;

    fn told(change: impl Fn(&mut serde_json::Value)) -> String {
        let mut json = serde_json::to_value(machines::machine("dgx-a100").unwrap()).unwrap();
        change(&mut json);
        let error = Facts::from_json(&json.to_string()).unwrap_err();
        assert!(matches!(error, FactsError::Field { .. }), "{error}");
        error.to_string()
    }

    #[test]
    fn an_error_names_the_field_and_the_shape() {
        let text = told(|json| json["nics"][3]["ports"][0]["rate_gbps"] = "fast".into());
        assert!(text.contains("nics[3].ports[0].rate_gbps"), "{text}");
        assert!(
            text.contains("\"fast\"") && text.contains("expected f64") && text.contains("unread"),
            "{text}"
        );
        let text = told(|json| json["gpus"][1]["colour"] = "green".into());
        assert!(text.contains("gpus[1].colour") && text.contains("unknown field"), "{text}");
        let text = told(|json| json["kernel"]["modules"] = serde_json::json!(["nvidia"]));
        assert!(text.contains("kernel.modules") && text.contains("map"), "{text}");
    }
}
