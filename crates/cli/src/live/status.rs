//! What the completion statuses of failed work requests mean (docs/reference/counters.md).

/// The statuses that the software device counts as errors, and a sentence for each.
pub(crate) const FAILURES: [(&str, &str); 11] = [
    ("LocalLength", "the message did not fit the receive buffer"),
    ("LocalQpOperation", "the queue pair was used wrongly"),
    ("LocalProtection", "local memory has no such key, ends before the request, or has vanished"),
    ("WindowBind", "a memory window could not be bound"),
    ("BadResponse", "the peer answered with a packet that does not belong to the request"),
    ("LocalAccess", "local memory vanished while bytes were placed into it"),
    ("RemoteInvalidRequest", "the peer found the request invalid"),
    ("RemoteAccess", "the peer refused access to its memory: wrong key, range or access right"),
    ("RemoteOperation", "the peer could not carry the request out"),
    ("RetryExceeded", "the peer did not answer, after all retries"),
    ("RnrRetryExceeded", "the peer never posted a receive buffer"),
];

/// The sentence for a status; nothing for an unknown one.
pub(crate) fn meaning(status: &str) -> &'static str {
    FAILURES.iter().find(|(name, _)| *name == status).map_or("", |(_, meaning)| meaning)
}

#[cfg(test)]
mod tests {
    use nobounce::Status;

    use super::*;

    #[test]
    fn every_status_that_a_software_device_counts_has_a_meaning() {
        for status in Status::ALL {
            let name = format!("{status:?}");
            // Success and a flushed request are no errors; two are of hardware devices only.
            let is_counted = !["Success", "Flushed", "Fatal", "General"].contains(&name.as_str());
            assert_eq!(!meaning(&name).is_empty(), is_counted, "{name}");
        }
    }
}
