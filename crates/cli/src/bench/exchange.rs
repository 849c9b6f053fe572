//! What the two ends of a bench say to each other on the side channel, between the timed parts.

use std::time::Duration;

use anyhow::{Context, bail};
use nobounce::Connection;
use serde::{Deserialize, Serialize};

use super::case::{Kind, Op, Wait};

/// How long one end waits for the other to prepare or check a round.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is to be measured, as the asking end tells it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Work {
    pub(super) op: Op,
    pub(super) kind: Kind,
    pub(super) size: u64,
    pub(super) wait: Wait,
    pub(super) seed: u64,
}

/// One step of the dialogue: `Work`, then any number of (`Round`, `Ready`, timed part, `Checked`), then `End`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Step {
    Work(Work),
    Round { index: u32, messages: u64 },
    Ready,
    Checked(Result<(), String>),
    End,
}

pub(super) fn say(connection: &Connection, step: &Step) -> anyhow::Result<()> {
    let bytes = serde_json::to_vec(step).context("cannot write a step of the bench dialogue")?;
    connection.send_message(&bytes).context("the other end of the bench does not listen")
}

pub(super) fn hear(connection: &Connection) -> anyhow::Result<Step> {
    let bytes = connection.recv_message(PATIENCE).context("the other end of the bench does not answer")?;
    serde_json::from_slice(&bytes)
        .context("the other end of the bench speaks another version of this dialogue")
}

pub(super) fn hear_ready(connection: &Connection) -> anyhow::Result<()> {
    match hear(connection)? {
        Step::Ready => Ok(()),
        other => bail!("the other end of the bench should be ready, but says {other:?}"),
    }
}

pub(super) fn hear_checked(connection: &Connection) -> anyhow::Result<Result<(), String>> {
    match hear(connection)? {
        Step::Checked(verdict) => Ok(verdict),
        other => bail!("the other end of the bench should have checked its memory, but says {other:?}"),
    }
}
