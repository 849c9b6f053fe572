//! Changes to facts by path: `*` means all, `name=mlx5_0` those with that field, `-` a new one at
//! the end.

use nobounce_topology::facts::Facts;
use serde_json::Value;

fn parts(path: &str) -> Vec<String> {
    path.trim_start_matches('/').split('/').map(|part| part.replace("~1", "/")).collect()
}

/// Calls `change` on every value at the path.
fn each(value: &mut Value, path: &[String], change: &mut dyn FnMut(&mut Value, &str) -> bool) -> bool {
    let Some((part, rest)) = path.split_first() else { return false };
    if rest.is_empty() && !part.contains('*') && !part.contains('=') {
        return change(value, part);
    }
    let mut hit = false;
    match value {
        Value::Array(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                let chosen = match part.split_once('=') {
                    Some((field, wanted)) => item.get(field).and_then(Value::as_str) == Some(wanted),
                    None => part == "*" || *part == index.to_string(),
                };
                if chosen {
                    hit |= each(item, rest, change);
                }
            }
        }
        Value::Object(fields) => {
            for (name, field) in fields.iter_mut() {
                if part == "*" || part == name {
                    hit |= each(field, rest, change);
                }
            }
        }
        _ => {}
    }
    hit
}

/// Facts with some values taken away and others set; `thread` names the case in errors.
pub(crate) fn edit(facts: &Facts, remove: &[String], set: &[(String, Value)], thread: &str) -> Facts {
    let mut json: Value = serde_json::from_str(&facts.to_json()).unwrap();
    for path in remove {
        let hit = each(&mut json, &parts(path), &mut |value, last| match value {
            Value::Object(fields) => fields.remove(last).is_some(),
            Value::Array(items) => {
                let before = items.len();
                items.retain(|item| item.as_str() != Some(last));
                items.len() < before
            }
            _ => false,
        }) || remove_elements(&mut json, &parts(path));
        assert!(hit, "{thread}: nothing at {path}");
    }
    for (path, new) in set {
        let hit = each(&mut json, &parts(path), &mut |value, last| match value {
            Value::Object(fields) => {
                fields.insert(last.to_owned(), new.clone());
                true
            }
            Value::Array(items) if last == "-" => {
                items.push(new.clone());
                true
            }
            Value::Array(items) => match last.parse::<usize>().ok().and_then(|index| items.get_mut(index)) {
                Some(item) => {
                    *item = new.clone();
                    true
                }
                None => false,
            },
            _ => false,
        });
        assert!(hit, "{thread}: nothing at {path}");
    }
    Facts::from_json(&json.to_string()).unwrap_or_else(|error| panic!("{thread}: {error}"))
}

/// `/devices/path=~1dev~1x`: takes elements of a list away; a `*` at the end of the wanted text
/// stands for any end.
fn remove_elements(json: &mut Value, path: &[String]) -> bool {
    let Some((last, front)) = path.split_last() else { return false };
    let Some((field, wanted)) = last.split_once('=') else { return false };
    let mut hit = false;
    let mut take = |value: &mut Value| {
        if let Value::Array(items) = value {
            let before = items.len();
            items.retain(|item| {
                let text = item.get(field).and_then(Value::as_str).unwrap_or_default();
                !wanted.strip_suffix('*').map_or(text == wanted, |begin| text.starts_with(begin))
            });
            hit |= items.len() < before;
        }
    };
    let mut at = vec![json];
    for part in front {
        at = at
            .into_iter()
            .flat_map(|value| match value {
                Value::Object(fields) => fields
                    .iter_mut()
                    .filter(|(name, _)| part == "*" || part == *name)
                    .map(|(_, v)| v)
                    .collect(),
                Value::Array(items) => items
                    .iter_mut()
                    .enumerate()
                    .filter(|(index, _)| part == "*" || *part == index.to_string())
                    .map(|(_, v)| v)
                    .collect::<Vec<_>>(),
                _ => Vec::new(),
            })
            .collect();
    }
    at.into_iter().for_each(&mut take);
    hit
}
