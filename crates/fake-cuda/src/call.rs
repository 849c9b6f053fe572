//! The entry of every function: a driver's first checks, and a panic barrier.

use std::ffi::CString;
use std::ops::{Deref, DerefMut};
use std::panic::{self, AssertUnwindSafe};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::Duration;

use crate::context;
use crate::lane;
use crate::status::{Answer, Status};
use crate::world::{self, World};

/// Preconditions of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Nothing but an initialised driver.
    Free,
    /// Nothing at all: it works before `cuInit`.
    Always,
    /// Not during a capture, unless the thread is RELAXED.
    Uncaptured,
    /// A current context.
    Context,
    /// A current context, and not during a capture unless the thread is RELAXED.
    ContextUncaptured,
}

/// The process that initialised the driver; a child of it may not call.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Blocking calls wait on it, with the state's lock released.
static LATER: Condvar = Condvar::new();

/// One call in progress: the state, locked.
pub(crate) struct Call {
    world: Option<MutexGuard<'static, World>>,
    context: u64,
}

/// Runs one function's body after the checks of its rule.
pub(crate) fn call(name: &'static str, rule: Rule, body: impl FnOnce(&mut Call) -> Answer) -> Status {
    let run = AssertUnwindSafe(|| enter(name, rule, body));
    match panic::catch_unwind(run) {
        Ok(Ok(())) => Status::SUCCESS,
        Ok(Err(status)) => status,
        Err(_) => Status::UNKNOWN,
    }
}

fn enter(name: &'static str, rule: Rule, body: impl FnOnce(&mut Call) -> Answer) -> Answer {
    let process = PROCESS.load(Ordering::Relaxed);
    // Before the lock, which another thread may have held when the process forked.
    if process != 0 && process != process::id() {
        return Err(Status::NOT_INITIALIZED);
    }
    let mut call = Call { world: Some(world::lock()), context: 0 };
    call.block_until(|_| !lane::are_calls_held());
    *call.calls.entry(name).or_default() += 1;
    if let Some(watcher) = call.knobs.watcher
        && let Ok(name) = CString::new(name)
    {
        watcher(name.as_ptr());
    }
    if let Some(code) = call.knobs.failure_of(name) {
        return Err(Status(code));
    }
    if rule != Rule::Always && !call.initialised {
        return Err(Status::NOT_INITIALIZED);
    }
    if matches!(rule, Rule::Context | Rule::ContextUncaptured) {
        call.context = context::current(&call)?;
    }
    if matches!(rule, Rule::Uncaptured | Rule::ContextUncaptured) {
        call.forbid_in_capture()?;
    }
    body(&mut call)
}

/// Notes the process that may call from now on.
pub(crate) fn claim() {
    PROCESS.store(process::id(), Ordering::Relaxed);
}

impl Call {
    /// The current context of a call whose rule demands one.
    pub(crate) fn context(&self) -> u64 {
        self.context
    }

    /// The device of the current context.
    pub(crate) fn device(&self) -> i32 {
        self.contexts.device_of(self.context).unwrap_or(0)
    }

    /// Blocks, with the world unlocked, until `done`.
    pub(crate) fn block_until(&mut self, mut done: impl FnMut(&World) -> bool) {
        while !done(self) {
            let guard = self.world.take().expect("a call holds the world");
            // A bounded wait instead of a wake-up from every place that could end it.
            let waited = LATER.wait_timeout(guard, Duration::from_micros(200));
            self.world = Some(waited.unwrap_or_else(PoisonError::into_inner).0);
        }
    }

    /// Blocks until the device has nothing left to do: what freeing memory does.
    pub(crate) fn synchronise(&mut self) {
        self.block_until(|world| {
            !lane::is_spinning() && world.streams.values().all(|stream| stream.lane.is_idle())
        });
    }
}

impl Deref for Call {
    type Target = World;

    fn deref(&self) -> &World {
        self.world.as_ref().expect("a call holds the world")
    }
}

impl DerefMut for Call {
    fn deref_mut(&mut self) -> &mut World {
        self.world.as_mut().expect("a call holds the world")
    }
}
