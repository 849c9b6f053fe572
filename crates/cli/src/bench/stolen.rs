//! Steal time: CPU time that the hypervisor took away. Spinning threads then stall, and all figures
//! vary.

use std::ops::Sub;

/// Steal time is reported from this share on. Of 83 starts of NCCL on virtual machines, those with
/// 0.75 % and more were up to four times as slow as the others.
const WORTH_TELLING: f64 = 0.005;

/// Ticks of all CPUs since boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CpuTime {
    all: u64,
    stolen: u64,
}

impl CpuTime {
    /// `None` where the kernel does not say.
    pub(crate) fn now() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/stat").ok()?)
    }

    pub(super) fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
        // user, nice, system, idle, iowait, irq, softirq, steal; guests are counted among users,
        // too.
        let ticks: Vec<u64> =
            line.split_whitespace().take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
        Some(Self { all: ticks.iter().sum(), stolen: *ticks.get(7)? })
    }

    /// What is to be told of the time between two looks.
    pub(crate) fn note(before: Option<Self>, after: Option<Self>) -> Option<String> {
        let Self { all, stolen } = after? - before?;
        #[allow(clippy::cast_precision_loss)] // a share
        let share = stolen as f64 / all.max(1) as f64;
        (share >= WORTH_TELLING).then(|| {
            format!(
                "the hypervisor took {:.1} % of the CPU time (steal in /proc/stat): the figures vary more and are worse than without",
                share * 100.0
            )
        })
    }
}

impl Sub for CpuTime {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self { all: self.all.saturating_sub(before.all), stolen: self.stolen.saturating_sub(before.stolen) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "cpu  100 0 50 800 10 0 5 35 0 0\ncpu0 100 0 50 800 10 0 5 35 0 0\nintr 1\n";

    #[test]
    fn what_the_kernel_writes_is_read() {
        assert_eq!(CpuTime::parse(BEFORE), Some(CpuTime { all: 1000, stolen: 35 }));
        for wrong in ["", "cpu0 1 2 3 4 5 6 7 8\n", "cpu  1 2 3\n", "cpu  1 2 3 4 5 6 7 x\n"] {
            assert_eq!(CpuTime::parse(wrong), None, "{wrong:?}");
        }
        assert!(CpuTime::now().is_some_and(|now| now.all >= now.stolen));
    }

    #[test]
    fn only_what_matters_is_told() {
        let before = CpuTime::parse(BEFORE);
        let after =
            |stolen| before.map(|time| CpuTime { all: time.all + 1000, stolen: time.stolen + stolen });
        assert_eq!(CpuTime::note(before, after(4)), None);
        assert!(CpuTime::note(before, after(29)).unwrap().contains("took 2.9 % of"));
        assert_eq!(CpuTime::note(None, after(500)), None);
        assert_eq!(CpuTime::note(before, before), None, "no time has passed");
    }
}
