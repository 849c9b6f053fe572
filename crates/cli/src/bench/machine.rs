//! Facts about this machine without which a measurement means nothing.

use std::fmt;
use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::size::Bytes;

/// Where a run took place, without the host's name.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// The CPU's model name.
    pub(crate) cpu: String,
    /// CPUs that are online.
    pub(crate) cores: usize,
    /// CPUs this process may use (`sched_getaffinity`), which containers and `taskset` narrow.
    pub(crate) allowed_cpus: Vec<usize>,
    /// Kernel release.
    pub(crate) kernel: String,
    /// Main memory in bytes.
    pub(crate) memory_bytes: u64,
    /// `net.core.rmem_max`: the largest socket buffer an ordinary user gets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rmem_max: Option<u64>,
    /// The GPU, where one was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gpu: Option<GpuFacts>,
}

/// Facts about the GPU without which a measurement means nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GpuFacts {
    /// Its name.
    pub(crate) name: String,
    /// Whether it is none: host memory plays its part, for tests.
    pub(crate) stand_in: bool,
    /// Where it is plugged.
    pub(crate) pci_address: String,
    /// The version of CUDA that its driver supports.
    pub(crate) cuda: String,
    /// Size of BAR1, through which the CPU reaches its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bar1_bytes: Option<u64>,
    /// The provider of the BAR1 window onto its memory, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) window: Option<String>,
    /// The paths of memory that was registered with default options.
    pub(crate) paths: String,
    /// Why a hardware NIC did not use the preferred direct methods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) refusals: Vec<String>,
    /// What loads, stores and the copy engine cost here.
    pub(crate) calibration: String,
    /// How the two processes share it.
    pub(crate) shared_by: String,
    /// Where the bytes were checked: `gpu`, or `host` after copying them there.
    pub(crate) checked_on: String,
}

impl fmt::Display for GpuFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.stand_in {
            return write!(f, "STAND-IN for a GPU: host memory");
        }
        write!(f, "{} at {}, CUDA {}", self.name, self.pci_address, self.cuda)?;
        self.bar1_bytes.map_or(Ok(()), |bytes| write!(f, ", BAR1 {}", Bytes(bytes)))
    }
}

impl Machine {
    /// Looks around.
    pub(crate) fn here() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        Self {
            cpu: cpu_model(&cpuinfo).unwrap_or_else(|| format!("unknown {}", std::env::consts::ARCH)),
            cores: cpuinfo.lines().filter(|line| line.starts_with("processor")).count(),
            allowed_cpus: allowed_cpus(),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            memory_bytes: memory_bytes(&read("/proc/meminfo")).unwrap_or(0),
            rmem_max: read("/proc/sys/net/core/rmem_max").trim().parse().ok(),
            gpu: None,
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let allowed = self.allowed_cpus.len();
        write!(f, "{}, ", self.cpu)?;
        if allowed == self.cores {
            write!(f, "{} CPUs", self.cores)?;
        } else {
            write!(f, "{allowed} of {} CPUs", self.cores)?;
        }
        write!(f, ", {}, Linux {}", Bytes(self.memory_bytes), self.kernel)?;
        self.rmem_max.map_or(Ok(()), |bytes| write!(f, ", rmem_max {bytes}"))?;
        self.gpu.as_ref().map_or(Ok(()), |gpu| write!(f, ", {gpu}"))
    }
}

/// Now, UTC, as `2026-11-15T02:01:02Z`.
pub(crate) fn timestamp() -> String {
    rfc3339(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

fn rfc3339(since_epoch: Duration) -> String {
    let seconds = since_epoch.as_secs();
    let (mut days, of_day) = (seconds / 86_400, seconds % 86_400);
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z", days + 1)
}

/// x86 calls it `model name`; others name the part elsewhere or not at all.
fn cpu_model(cpuinfo: &str) -> Option<String> {
    ["model name", "Model", "cpu model"].iter().find_map(|wanted| {
        let value = cpuinfo.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == *wanted).then(|| value.split_whitespace().collect::<Vec<_>>().join(" "))
        });
        value.filter(|value| !value.is_empty())
    })
}

fn memory_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

fn allowed_cpus() -> Vec<usize> {
    // SAFETY: an all-zero cpu_set_t is a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is ours, writable, and exactly as large as we say; pid 0 is the calling
    // thread.
    let failed = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) } != 0;
    if failed {
        return Vec::new();
    }
    let bits = usize::try_from(libc::CPU_SETSIZE).unwrap_or(0);
    // SAFETY: every index is below CPU_SETSIZE, the number of bits in the set.
    (0..bits).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_facts() {
        let machine = Machine::here();
        assert!(machine.cores > 0 && !machine.allowed_cpus.is_empty(), "{machine:?}");
        assert!(machine.memory_bytes > 1 << 20 && !machine.kernel.is_empty(), "{machine:?}");
    }

    #[test]
    fn facts_are_found_by_name() {
        let model = cpu_model("processor\t: 0\nmodel\t\t: 6\nmodel name\t: Example  CPU @ 2 GHz\n");
        assert_eq!(model.as_deref(), Some("Example CPU @ 2 GHz"));
        assert_eq!(cpu_model("processor : 0\n"), None);
        assert_eq!(memory_bytes("MemTotal:       1024 kB\nMemFree: 1 kB\n"), Some(1 << 20));
    }

    #[test]
    fn time_is_shown_in_utc() {
        let shown = |seconds| rfc3339(Duration::from_secs(seconds));
        assert_eq!(shown(0), "1970-01-01T00:00:00Z");
        assert_eq!(shown(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(shown(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(shown(1_767_225_599), "2025-12-31T23:59:59Z");
    }
}
