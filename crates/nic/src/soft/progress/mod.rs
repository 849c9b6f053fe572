//! Which thread drives an engine, and how a thread waits.
//!
//! The mode is decided once, when the device opens. In both modes a waiting thread spins for about
//! one round trip. Then it sleeps in the kernel, where a packet or a post wakes it at once. A
//! thread that sleeps keeps its scheduling credit and runs as soon as it is woken. A thread that
//! spins on a busy machine has spent it and waits for milliseconds
//! (docs/design/decisions/progress.md).
//!
//! | module | what |
//! |---|---|
//! | `mode` | [`Mode`](mode::Mode), decided from the configured `Progress` (`soft/config.rs`) |
//! | `thread` | the engine thread: drives in `thread` mode; in `caller` mode only without polls |
//! | `sync/waker` | how posters and copies wake a sleeping engine thread |
//! | `engine/submission` | the submission queue of `thread` mode, and the room in each work queue |
//! | `attention` | `caller` mode: whether the application polls often enough |
//! | `sync/spin` | how long a waiting thread spins |
//! | `watch` | a thread that blocks on a completion channel watches the links |
//! | `wait` | sleeping on the descriptors of a link |
//! | `lock`, `handle`, `set` | an engine's lock; an engine with its thread; all engines |
//! | `process/cpu` | allowed CPUs, scheduler slices |

pub(crate) mod attention;
pub(crate) mod exit_work;
pub(crate) mod handle;
pub(crate) mod lock;
pub(crate) mod mode;
pub(crate) mod set;
mod thread;
pub(crate) mod wait;
pub(crate) mod watch;
