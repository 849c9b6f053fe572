//! Messages between the two ends of a bench on the side channel, between the timed parts.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nobounce::{Connection, MessageError, Region, RemoteRegion};
use nobounce_topology::clean;
use serde::{Deserialize, Serialize};

use super::case::{CaseKind, Op, Place, Wait};
use super::counted::EndCounted;
use super::round::Round;
use super::watch;

/// How long one end waits for the other to prepare or check a round.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Meanwhile it looks so often whether its own device is well.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// What is to be measured, as the asking end tells it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Work {
    pub(super) op: Op,
    pub(super) kind: CaseKind,
    pub(super) place: Place,
    pub(super) size: u64,
    pub(super) wait: Wait,
    pub(super) seed: u64,
}

/// Most bytes of messages that the serving end registers for a client.
const MAX_SERVED: u64 = 2 << 30;
/// Most messages of one round: hours, and far below what a counter holds.
const MAX_MESSAGES: u64 = 1 << 40;

impl Work {
    /// Checks what a client asks for; it may be anyone who reaches the port.
    pub(super) fn check(&self, queue_pairs: usize) -> anyhow::Result<()> {
        let bytes = u64::try_from(queue_pairs).ok().and_then(|count| self.size.checked_mul(count.max(1)));
        if bytes.is_none_or(|bytes| bytes > MAX_SERVED) {
            bail!(
                "refused {queue_pairs} queue pairs with messages of {} bytes: at most {MAX_SERVED} bytes together",
                self.size
            );
        }
        Ok(())
    }
}

/// Checks a round that a client asks for.
pub(super) fn check_round(round: Round) -> anyhow::Result<()> {
    if round.messages == 0 || round.messages > MAX_MESSAGES {
        bail!("refused a round of {} messages: 1 to {MAX_MESSAGES} are allowed", round.messages);
    }
    Ok(())
}

/// One step of the protocol: `Tcp`, answered by `TcpPort`, and no more. Over several devices it
/// starts with `Rails`, answered by `RailPorts`. Then come `Work` and the exchange of regions (or
/// `Sorry`). Any number of (`Round`, `Ready`, timed part, `Checked`) follow, then `End`, answered
/// by `Counted`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Step {
    /// Measure TCP; the answer names the port.
    Tcp,
    TcpPort(u16),
    /// So many devices are asked for, one connection each.
    Rails(u32),
    /// Where the others listen, in their order.
    RailPorts(Vec<u16>),
    Work(Work),
    Round(Round),
    Ready,
    /// The timed part is over; sent where no message of the case itself says so.
    Over,
    /// The error, if any, and the CPU seconds of the timed part.
    Checked(Result<(), String>, f64),
    End,
    /// What the NIC of the serving end counted since `Work`.
    Counted(EndCounted),
    /// The serving end cannot do that work.
    Sorry(String),
}

pub(super) fn say(connection: &Connection, step: &Step) -> anyhow::Result<()> {
    let bytes = serde_json::to_vec(step).context("cannot encode a bench message")?;
    connection.send_message(&bytes).context("cannot send to the bench peer")
}

pub(super) fn hear(connection: &Connection) -> anyhow::Result<Step> {
    let start = Instant::now();
    let bytes = loop {
        match connection.recv_message(LOOK_EVERY) {
            // The side channel may use the cable that was just pulled. Then no answer comes, and
            // this check of our own device reports why.
            Err(MessageError::Timeout(_)) if start.elapsed() < EXCHANGE_TIMEOUT => {
                watch::check_device(connection)?;
            }
            Err(MessageError::Timeout(_)) => {
                let silent = MessageError::Timeout(EXCHANGE_TIMEOUT);
                return Err(silent).context("no answer from the bench peer");
            }
            heard => break heard.context("no answer from the bench peer")?,
        }
    };
    serde_json::from_slice(&bytes)
        .context("the bench peer sent an unknown message; run the same version at both ends")
}

pub(super) fn hear_ready(connection: &Connection) -> anyhow::Result<()> {
    match hear(connection)? {
        Step::Ready => Ok(()),
        other => bail!("bench peer: expected Ready, got {other:?}"),
    }
}

pub(super) fn hear_checked(connection: &Connection) -> anyhow::Result<(Result<(), String>, f64)> {
    match hear(connection)? {
        Step::Checked(verdict, cpu) => Ok((verdict.map_err(|why| clean(&why)), cpu)),
        other => bail!("bench peer: expected Checked, got {other:?}"),
    }
}

/// Sends our region descriptor and receives the other end's, or why it has none.
pub(super) fn exchange_regions(connection: &Connection, ours: &Region) -> anyhow::Result<RemoteRegion> {
    match connection.exchange_region(ours, EXCHANGE_TIMEOUT) {
        Ok(theirs) => Ok(theirs),
        // Something else than a region came: it says why.
        Err(error @ MessageError::Order { .. }) => match hear(connection)? {
            Step::Sorry(why) => bail!("the bench peer refused: {}", clean(&why)),
            _ => Err(error.into()),
        },
        Err(error) => Err(error.into()),
    }
}

pub(super) fn hear_counted(connection: &Connection) -> anyhow::Result<EndCounted> {
    match hear(connection)? {
        Step::Counted(counted) => Ok(counted),
        other => bail!("bench peer: expected Counted, got {other:?}"),
    }
}

/// Reads one message as the serving end does, and prepares what it asks for, for the fuzz target.
///
/// # Panics
/// When work or a round passes the checks that must not: that is the fuzzed property.
pub fn fuzz_step(data: &[u8]) {
    let Ok(step) = serde_json::from_slice::<Step>(data) else { return };
    match &step {
        Step::Work(work) if work.check(data.len() % 64 + 1).is_ok() => {
            assert!(work.size * (data.len() as u64 % 64 + 1) <= MAX_SERVED);
        }
        Step::Round(round) if check_round(*round).is_ok() => {
            assert!((1..=MAX_MESSAGES).contains(&round.messages));
            let _ = round.message(round.messages - 1);
        }
        Step::Checked(Err(why), _) | Step::Sorry(why) => {
            assert!(!clean(why).contains('\u{1b}'), "an escape sequence");
        }
        _ => {}
    }
    let _ = format!("{step:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(size: u64) -> Work {
        Work { op: Op::Write, kind: CaseKind::Latency, place: Place::Host, size, wait: Wait::Cq, seed: 1 }
    }

    #[test]
    fn a_client_cannot_ask_for_all_memory_or_for_ever() {
        assert!(work(8 << 20).check(64).is_ok() && work(1 << 30).check(2).is_ok());
        for (size, queue_pairs) in
            [(u64::MAX - 63, 1), (3_000_000_000, 1), (1 << 30, 3), (u64::MAX, usize::MAX)]
        {
            assert!(work(size).check(queue_pairs).is_err(), "{size} {queue_pairs}");
        }
        let round = |messages| Round { index: 0, messages, checked: false };
        assert!(check_round(round(1)).is_ok() && check_round(round(1 << 40)).is_ok());
        assert!(check_round(round(0)).is_err() && check_round(round(1 << 62)).is_err());
    }
}
