//! The head of a request.

/// A GET request.
#[derive(Debug, Default)]
pub(crate) struct Request {
    pub(crate) path: String,
    /// Decoded names and values.
    pub(crate) query: Vec<(String, String)>,
    pub(crate) host: String,
    pub(crate) authorization: String,
    pub(crate) accept: String,
}

/// Why it is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    Malformed,
    Method,
}

impl Request {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Refused> {
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut head = httparse::Request::new(&mut headers);
        match head.parse(bytes) {
            Ok(httparse::Status::Complete(_)) => {}
            _ => return Err(Refused::Malformed),
        }
        if head.method != Some("GET") {
            return Err(Refused::Method);
        }
        let target = head.path.filter(|path| path.starts_with('/')).ok_or(Refused::Malformed)?;
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let header = |name: &str| {
            let found = head.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
            found.map_or_else(String::new, |header| String::from_utf8_lossy(header.value).into_owned())
        };
        let query = query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(name), decode(value))
        });
        Ok(Self {
            path: path.to_owned(),
            query: query.collect(),
            host: header("host"),
            authorization: header("authorization"),
            accept: header("accept"),
        })
    }

    /// The first value of this name in the query.
    pub(crate) fn asked(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }
}

/// Decodes `%20` and `+`. What is not valid stays as it is.
fn decode(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let hex = after.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        let code = hex.filter(|two| two.bytes().all(|byte| byte.is_ascii_hexdigit()));
        match (first, code.and_then(|code| u8::from_str_radix(code, 16).ok())) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &after[2..];
                continue;
            }
            (b'+', _) => bytes.push(b' '),
            _ => bytes.push(*first),
        }
        rest = after;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded() {
        for (text, meant) in
            [("a%2Fb+c", "a/b c"), ("%", "%"), ("%zz", "%zz"), ("%e2%82%ac", "€"), ("%ff", "\u{fffd}")]
        {
            assert_eq!(decode(text), meant);
        }
    }
}
