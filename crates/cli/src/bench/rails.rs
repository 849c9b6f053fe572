//! A case over several devices: each message is split over them by the speed of their ports.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nobounce::{Connection, Device, RailRegion, Rails, RemoteRailRegion};

use super::case::{Case, Op};
use super::exchange::{Step, Work, hear, say};
use super::gpu;
use super::peer;
use super::ring::{self, Ring};
use super::round::Round;
use super::side::{Side, Timed, path_of};
use super::sides;

/// How long a rail may take to come about.
const SOON: Duration = Duration::from_secs(10);
/// Timeout of one transfer: a failing rail reports long before.
const TRANSFER: Duration = Duration::from_secs(60);

/// The connection of a case, or one for each rail.
pub(super) enum Connections {
    One(Box<Connection>),
    Several(Rails),
}

/// A line about the rails, where there are several.
pub(super) fn note(devices: &[Device]) -> Option<String> {
    let speed = |device: &Device| match device.nic().hard().map(|hard| hard.port().megabits) {
        Some(megabits) => format!("{} at {} Gb/s", device.nic().name(), megabits / 1000),
        None => format!("{} at {}", device.nic().name(), device.nic().local()),
    };
    let rails: Vec<String> = devices.iter().map(speed).collect();
    (rails.len() > 1).then(|| {
        format!("{} rails, each message split by the speed of their ports: {}", rails.len(), rails.join(", "))
    })
}

/// Requests as many connections from the other end as there are devices.
pub(super) fn ask(first: Connection, devices: &[Device], case: &Case) -> anyhow::Result<Connections> {
    if devices.len() < 2 {
        return Ok(Connections::One(Box::new(first)));
    }
    say(&first, &Step::Rails(u32::try_from(devices.len())?))?;
    let ports = match hear(&first)? {
        Step::RailPorts(ports) => ports,
        Step::Sorry(why) => bail!("the bench peer refused: {why}"),
        other => bail!("bench peer: expected RailPorts, got {other:?}"),
    };
    ensure!(ports.len() + 1 == devices.len(), "the bench peer has {} rails", ports.len() + 1);
    let there = first.peer_control_addr().context("the bench peer is gone")?.ip();
    let options = nobounce::ConnectOptions { mtu: nobounce::Mtu::from_bytes(case.mtu), ..peer::options() };
    let mut rails = vec![first];
    for (at, (device, port)) in (1..).zip(devices[1..].iter().zip(ports)) {
        let rail = device.connect((there, port), &options);
        rails.push(rail.with_context(|| format!("rail {at} ({})", device.nic().name()))?);
    }
    Ok(Connections::Several(Rails::new(rails)?))
}

/// Answers that: the other devices listen at ports of their own, until the requesting end has
/// connected to each.
pub(super) fn answer(
    first: Connection,
    count: u32,
    devices: &[Device],
    here: IpAddr,
) -> anyhow::Result<Connections> {
    if usize::try_from(count)? != devices.len() {
        let why = format!(
            "{count} rails requested, this end has {}: name the same number of devices at both ends (--device a,b)",
            devices.len()
        );
        let _ = say(&first, &Step::Sorry(why.clone())); // if it still listens
        bail!(why);
    }
    let listen = |device: &Device| device.listen_with((here, 0), &peer::options());
    let listeners = devices[1..].iter().map(listen).collect::<Result<Vec<_>, _>>()?;
    let ports = listeners.iter().map(|listener| listener.local_addr().port()).collect();
    say(&first, &Step::RailPorts(ports))?;
    let mut rails = vec![first];
    for listener in &listeners {
        rails.push(listener.accept(SOON)?);
    }
    Ok(Connections::Several(Rails::new(rails)?))
}

impl Connections {
    /// The one on which the two ends talk.
    pub(super) fn first(&self) -> &Connection {
        match self {
            Self::One(connection) => connection,
            Self::Several(rails) => &rails.connections()[0],
        }
    }

    /// One end of the case, see [`sides::open`].
    pub(super) fn open<'a>(
        &'a self,
        work: Work,
        asks: bool,
        refuse: impl FnOnce(&anyhow::Error),
    ) -> anyhow::Result<Box<dyn Side + 'a>> {
        match self {
            Self::One(connection) => sides::open(connection, work, asks, refuse),
            Self::Several(rails) => {
                let prepared = RailEnd::prepare(rails, work, asks).inspect_err(refuse)?;
                Ok(Box::new(prepared.connect()?))
            }
        }
    }
}

/// One end of a case over rails.
struct RailEnd<'a> {
    rails: &'a Rails,
    ring: Ring,
    memory: RailRegion,
    remote: RemoteRailRegion,
    work: Work,
    asks: bool,
}

impl<'a> RailEnd<'a> {
    fn prepare(rails: &'a Rails, work: Work, asks: bool) -> anyhow::Result<Self> {
        ensure!(matches!(work.op, Op::Write | Op::Read), "rails carry writes and reads");
        let ring = Ring::new(rails.connections()[0].device(), work.place, work.size, work.seed, false)?;
        let memory = rails.share(ring.region.clone(), &ring::options(work.place))?;
        Ok(Self { rails, ring, memory, remote: Vec::new(), work, asks })
    }

    fn connect(mut self) -> anyhow::Result<Self> {
        self.remote = self.rails.exchange(&self.memory, SOON)?;
        Ok(self)
    }

    fn transfer(&self, message: u64) -> anyhow::Result<()> {
        let (source, target) = (self.ring.source(message), self.ring.target(message));
        let size = self.ring.size;
        match self.work.op {
            Op::Read => {
                self.rails.read(&self.memory, target..target + size, &self.remote, source as u64, TRANSFER)?
            }
            _ => self.rails.write(
                &self.memory,
                source..source + size,
                &self.remote,
                target as u64,
                TRANSFER,
            )?,
        }
        Ok(())
    }
}

impl Side for RailEnd<'_> {
    fn prepare(&self, round: Round) -> anyhow::Result<()> {
        self.ring.prepare(round)
    }

    fn timed(&self, Round { messages, .. }: Round) -> anyhow::Result<Timed> {
        let first = &self.rails.connections()[0];
        if !self.asks {
            // The devices do it all; the asking end says when.
            return match hear(first)? {
                Step::Over => Ok(Timed::default()),
                other => bail!("bench client: expected Over, got {other:?}"),
            };
        }
        let start = Instant::now();
        (0..messages).try_for_each(|message| self.transfer(message))?;
        let seconds = start.elapsed().as_secs_f64();
        say(first, &Step::Over)?;
        Ok(Timed { seconds, messages, latencies: Vec::new() })
    }

    fn check(&self, round: Round) -> Result<(), String> {
        let arrives_here = (self.work.op == Op::Read) == self.asks;
        self.ring.check(round, if arrives_here { round.messages } else { 0 }, false, false)
    }

    fn checkable(&self) -> u64 {
        self.ring.checkable()
    }

    fn path(&self) -> String {
        let mut paths: Vec<String> = self.memory.regions().map(path_of).collect();
        paths.dedup();
        paths.join(", ")
    }

    fn memory(&self) -> &'static str {
        gpu::memory_name(self.work.place)
    }
}
