//! Which route a read takes from a file into the memory of a GPU: decided by the links of its
//! chain.

use serde::Serialize;

use crate::finding::Finding;
use nobounce_topology::tree::Distance;

/// What a link does to a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The route does not depend on it.
    NotNeeded,
    /// It lets the route through.
    Ok,
    /// The facts do not say.
    Unknown,
    /// It stops the route.
    Blocks,
}

impl State {
    /// Its name for people.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::NotNeeded => "-",
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Blocks => "blocks",
        }
    }
}

/// One link of the chain from the file to the GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChainLink {
    /// Its name: `filesystem`.
    pub name: &'static str,
    /// What it does to P2PDMA.
    pub p2pdma: State,
    /// What it does to nvidia-fs.
    pub nvidia_fs: State,
    /// What was seen.
    pub text: String,
    /// Whether its findings have a fix on this machine.
    #[serde(skip)]
    pub fixable: bool,
}

impl ChainLink {
    /// The worse of both states.
    #[must_use]
    pub fn worst(&self) -> State {
        self.p2pdma.max(self.nvidia_fs)
    }
}

/// The route of a read by cuFile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Route {
    /// The drive writes into GPU memory, by the kernel's P2PDMA.
    P2pdma,
    /// The drive or adapter writes into GPU memory, by nvidia-fs.
    NvidiaFs,
    /// Through host memory: cuFile's compat mode.
    Compat,
    /// cuFile returns an error: nothing direct works, and compat mode is not allowed.
    Fails,
    /// The facts do not say.
    Unknown,
}

impl Route {
    /// Its name for people.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::P2pdma => "direct (P2PDMA)",
            Self::NvidiaFs => "direct (nvidia-fs)",
            Self::Compat => "through host memory (compat)",
            Self::Fails => "error (compat not allowed)",
            Self::Unknown => "unknown",
        }
    }

    /// Whether bytes skip host memory.
    #[must_use]
    pub const fn is_direct(self) -> bool {
        matches!(self, Self::P2pdma | Self::NvidiaFs)
    }
}

/// How nobounce itself would bring the file into the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Own {
    /// One copy by the CPU, from the page cache through the BAR1 window; long reads of what is not
    /// cached are staged.
    Window,
    /// The same without write-combining.
    SlowWindow,
    /// The copy engine, from host memory.
    CopyEngine,
    /// The window was not probed.
    Unknown,
}

impl Own {
    /// Its name for people.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Window => "window",
            Self::SlowWindow => "slow window",
            Self::CopyEngine => "copy engine",
            Self::Unknown => "unknown",
        }
    }
}

/// The route for one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StorageVerdict {
    /// Its PCI address.
    pub gpu: String,
    /// Its index for the driver.
    pub gpu_index: Option<u32>,
    /// Distance to the farthest drive of the file.
    pub distance: Option<Distance>,
    /// The route of cuFile.
    pub route: Route,
    /// Why.
    pub reasons: Vec<String>,
    /// nobounce's own method.
    pub own: Own,
    /// Why.
    pub own_reason: String,
    /// Links of this GPU alone.
    pub links: Vec<ChainLink>,
}

/// What can be said of a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StorageDiagnosis {
    /// The path.
    pub path: String,
    /// Links that all GPUs share.
    pub chain: Vec<ChainLink>,
    /// The route for each GPU.
    pub verdicts: Vec<StorageVerdict>,
    /// Findings, the gravest first.
    pub findings: Vec<Finding>,
    /// Whether a direct route is lost to something that can be fixed: exit code 1.
    pub direct_is_lost: bool,
}

/// The worst state of a route over a chain.
pub(crate) fn worst<'a>(
    chain: impl Iterator<Item = &'a ChainLink>,
    of: impl Fn(&ChainLink) -> State,
) -> State {
    chain.map(of).max().unwrap_or(State::Unknown)
}

/// The route, and the reasons. `compat` says whether cuFile may fall back; none where that is not
/// known. A link in an unknown state never ends in a direct route.
pub(crate) fn decide(chain: &[&ChainLink], compat: Option<bool>) -> (Route, Vec<String>) {
    let p2pdma = worst(chain.iter().copied(), |link| link.p2pdma);
    let nvidia_fs = worst(chain.iter().copied(), |link| link.nvidia_fs);
    let named = |route: &str, of: &dyn Fn(&ChainLink) -> State, state: State| {
        let names: Vec<&str> = chain.iter().filter(|link| of(link) == state).map(|link| link.name).collect();
        (!names.is_empty()).then(|| format!("{route} {}: {}", verb(state), names.join(", ")))
    };
    let of = |state: State| {
        let p2pdma = named("P2PDMA", &|link| link.p2pdma, state);
        let nvidia_fs = named("nvidia-fs", &|link| link.nvidia_fs, state);
        p2pdma.into_iter().chain(nvidia_fs).collect::<Vec<_>>()
    };
    match (p2pdma, nvidia_fs) {
        (State::Ok | State::NotNeeded, _) => {
            (Route::P2pdma, vec!["cuFile is set to P2PDMA, and no link stops it".to_owned()])
        }
        (State::Blocks, State::Ok | State::NotNeeded) => {
            let mut reasons = vec!["nvidia-fs is ready, and no link stops it".to_owned()];
            reasons.extend(named("P2PDMA", &|link| link.p2pdma, State::Blocks));
            (Route::NvidiaFs, reasons)
        }
        (State::Blocks, State::Blocks) => {
            let reasons = of(State::Blocks);
            match compat {
                Some(true) => (Route::Compat, reasons),
                Some(false) => (Route::Fails, reasons),
                None => {
                    let told = "neither direct route is there; whether cuFile may use compat mode is unknown";
                    (Route::Unknown, std::iter::once(told.to_owned()).chain(reasons).collect())
                }
            }
        }
        (p2pdma, nvidia_fs) => {
            // The unknown links of a route that nothing stops for certain decide.
            let mut reasons = Vec::new();
            if p2pdma == State::Unknown {
                reasons.extend(named("P2PDMA", &|link| link.p2pdma, State::Unknown));
            } else {
                reasons.extend(named("P2PDMA", &|link| link.p2pdma, State::Blocks));
            }
            if nvidia_fs == State::Unknown {
                reasons.extend(named("nvidia-fs", &|link| link.nvidia_fs, State::Unknown));
            } else {
                reasons.extend(named("nvidia-fs", &|link| link.nvidia_fs, State::Blocks));
            }
            if nvidia_fs == State::Ok {
                reasons.push("nvidia-fs is ready, but cuFile tries P2PDMA first".to_owned());
            }
            (Route::Unknown, reasons)
        }
    }
}

const fn verb(state: State) -> &'static str {
    match state {
        State::Unknown => "depends on",
        _ => "is stopped by",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(p2pdma: State, nvidia_fs: State) -> ChainLink {
        ChainLink { name: "test", p2pdma, nvidia_fs, text: String::new(), fixable: true }
    }

    /// Every pair of states of two links: a direct route needs each of its links, and an unknown
    /// one ends in no claim.
    #[test]
    fn no_route_is_claimed_that_a_link_does_not_allow() {
        const ALL: [State; 4] = [State::NotNeeded, State::Ok, State::Unknown, State::Blocks];
        for one in ALL.iter().flat_map(|a| ALL.iter().map(|b| link(*a, *b))) {
            for other in ALL.iter().flat_map(|a| ALL.iter().map(|b| link(*a, *b))) {
                for compat in [None, Some(false), Some(true)] {
                    let chain = [&one, &other];
                    let (route, reasons) = decide(&chain, compat);
                    let all =
                        |of: &dyn Fn(&ChainLink) -> State| chain.iter().all(|link| of(link) <= State::Ok);
                    let any =
                        |of: &dyn Fn(&ChainLink) -> State| chain.iter().any(|link| of(link) == State::Blocks);
                    assert!(!reasons.is_empty());
                    match route {
                        Route::P2pdma => assert!(all(&|link| link.p2pdma)),
                        Route::NvidiaFs => assert!(all(&|link| link.nvidia_fs) && any(&|link| link.p2pdma)),
                        Route::Compat | Route::Fails => {
                            assert!(any(&|link| link.p2pdma) && any(&|link| link.nvidia_fs));
                            assert_eq!(compat, Some(route == Route::Compat));
                        }
                        Route::Unknown => {}
                    }
                }
            }
        }
    }
}
