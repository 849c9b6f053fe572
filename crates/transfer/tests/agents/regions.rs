//! Exports, metadata, generations and registrations.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nobounce_transfer::{
    Agent, AgentError, AgentOptions, Foreign, Gone, Notify, Outcome, Piece, TransferError,
};

use super::{Pair, SOON, addr, bytes_of, device, fill};

const LIST: [Piece; 1] = [Piece { local: 0, remote: 0, len: 64 }];

#[test]
fn exports_come_and_go_while_connected() {
    let pair = Pair::new(4096, &AgentOptions::default());
    let late = pair.target.register(8192).unwrap();
    let error = pair.peer.region("late", Duration::from_millis(10)).unwrap_err().to_string();
    assert!(error.contains("exports no region \"late\"") && error.contains("\"kv\""), "{error}");
    let (_, version) = pair.target.metadata_since(0);
    pair.target.export("late", &late.part(4096, 4096).unwrap()).unwrap();
    let remote = pair.peer.region("late", SOON).unwrap();
    assert_eq!(remote.len(), 4096);
    let sent = fill(&pair.local, 1);
    let whole = [Piece { local: 0, remote: 0, len: 4096 }];
    pair.peer.write_list(&pair.local, &remote, &whole, Notify::Nothing).unwrap().wait(SOON).unwrap();
    assert!(
        bytes_of(&late.part(4096, 4096).unwrap()) == sent
            && bytes_of(&late.part(0, 4096).unwrap()) == [0; 4096]
    );
    let (new, _) = pair.target.metadata_since(version);
    assert!(new.len() < pair.target.metadata().len(), "only what is new");
    assert!(pair.target.withdraw("late") && !pair.target.withdraw("late"));
    while pair.peer.regions().contains(&"late".to_owned()) {
        std::thread::yield_now();
    }
    let refused = pair.peer.write_list(&pair.local, &remote, &LIST, Notify::Nothing);
    assert!(matches!(refused, Err(TransferError::Withdrawn { .. })), "{refused:?}");
}

#[test]
fn metadata_travel_by_any_channel() {
    let pair = Pair::new(4096, &AgentOptions::default());
    let other = Agent::new(&device(), "other", AgentOptions::default()).unwrap();
    let start = Instant::now();
    let peer = other.connect_to(&pair.target.metadata(), SOON).unwrap();
    let remote = peer.region("kv", Duration::ZERO).unwrap();
    let local = other.register(4096).unwrap();
    peer.write_list(&local, &remote, &LIST, Notify::Nothing).unwrap().wait(SOON).unwrap();
    println!("first bytes after {:?}", start.elapsed());
    assert!(matches!(other.connect_to(b"nonsense", SOON), Err(AgentError::Metadata)));
    assert!(matches!(pair.peer.add_metadata(&other.metadata()), Err(AgentError::Stale { .. })));
    let nowhere = Agent::new(&device(), "silent", AgentOptions::default()).unwrap().metadata();
    assert!(matches!(other.connect_to(&nowhere, SOON), Err(AgentError::NotListening)));
}

#[test]
fn agents_with_the_same_name_are_different_peers() {
    let listening = Agent::listening(&device(), "target", "127.0.0.1:0", AgentOptions::default()).unwrap();
    let start = || {
        let agent = Agent::listening(&device(), "prefill", "127.0.0.1:0", AgentOptions::default()).unwrap();
        let peer = agent.connect(addr(&listening), SOON).unwrap();
        (agent, peer, listening.accept(SOON).unwrap())
    };
    let (first, _peer, old) = start();
    let view = first.register(4096).unwrap();
    first.export("kv", &view).unwrap();
    let stale = old.region("kv", SOON).unwrap();
    let (second, other, new) = start();
    assert_ne!((old.name(), old.generation()), (new.name(), new.generation()));
    other.region("nothing", Duration::from_millis(50)).unwrap_err();
    assert_eq!((old.gone(), new.gone()), (None, None), "nothing says that the first one is gone");
    let local = listening.register(4096).unwrap();
    let stale = new.write_list(&local, &stale, &LIST, Notify::Nothing);
    assert!(matches!(stale, Err(TransferError::Stale { .. })), "{stale:?}");
    drop((first, second));
    while new.gone().is_none() || old.gone().is_none() {
        std::thread::yield_now();
    }
    assert_eq!((old.gone(), new.gone()), (Some(Gone::Closed), Some(Gone::Closed)));
}

#[test]
fn views_of_one_buffer_share_its_registration() {
    let agent = Agent::new(&device(), "one", AgentOptions::default()).unwrap();
    let mut buffer = vec![0_u8; 1 << 20];
    let base = buffer.as_mut_ptr().expose_provenance() as u64;
    let register = |at: u64, len| {
        let memory =
            Foreign { addr: base + at, len, is_gpu: false, is_read_only: false, is_on_demand: false };
        // SAFETY: the buffer outlives all views, and is not used otherwise.
        unsafe { agent.register_raw(&memory, None).unwrap() }
    };
    let whole = register(0, 1 << 20);
    let views: Vec<_> = (0..1000).map(|at| register(at * 1024, 1024)).collect();
    let keys: std::collections::BTreeSet<_> = views.iter().map(|view| view.region().mr().rkey()).collect();
    assert_eq!(keys.into_iter().collect::<Vec<_>>(), [whole.region().mr().rkey()]);
    assert_eq!(views[3].addr(), whole.addr() + 3072);
    drop((whole, views));
    let again = register(1024, 1024);
    assert_eq!(again.offset(), 0, "nothing is left of the first registration");
}

#[test]
fn read_only_memory_is_sent_and_never_written() {
    static WORDS: [u8; 4096] = [7; 4096];
    let pair = Pair::new(4096, &AgentOptions::default());
    let addr = WORDS.as_ptr().expose_provenance() as u64;
    let memory = Foreign { addr, len: 4096, is_gpu: false, is_read_only: true, is_on_demand: false };
    // SAFETY: static memory, which is only read.
    let words = unsafe { pair.initiator.register_raw(&memory, None).unwrap() };
    let whole = [Piece { local: 0, remote: 0, len: 4096 }];
    pair.peer.write_list(&words, &pair.remote, &whole, Notify::Nothing).unwrap().wait(SOON).unwrap();
    assert!(bytes_of(&pair.exported) == WORDS);
    let refused = pair.peer.read_list(&words, &pair.remote, &whole, Notify::Nothing);
    assert_eq!(refused.unwrap_err(), TransferError::ReadOnly);
    // A peer may read it, and is refused when it writes.
    pair.initiator.export("words", &words).unwrap();
    let back = pair.target.accept(SOON).unwrap();
    let (theirs, local) = (back.region("words", SOON).unwrap(), pair.target.register(4096).unwrap());
    back.read_list(&local, &theirs, &whole, Notify::Nothing).unwrap().wait(SOON).unwrap();
    assert!(bytes_of(&local) == WORDS);
    let write = back.write_list(&local, &theirs, &whole, Notify::Tag(b"wrong")).unwrap();
    assert!(matches!(write.wait(SOON), Err(TransferError::RemoteAccess { .. })));
    let told = pair.initiator.notification(SOON).unwrap();
    assert!(
        matches!(&told.outcome, Outcome::Failed { reason } if reason.contains("refused access")),
        "{told:?}"
    );
    while back.gone().is_none() {
        std::thread::yield_now();
    }
    assert!(back.gone().unwrap().to_string().contains("refused access"));
}

#[test]
fn old_metadata_do_not_replace_what_the_link_has_told() {
    let pair = Pair::new(4096, &AgentOptions::default());
    let old = pair.target.metadata();
    let more = pair.target.register(8192).unwrap();
    pair.target.export("kv", &more).unwrap();
    while pair.peer.region("kv", SOON).unwrap().len() != 8192 {
        std::thread::yield_now();
    }
    pair.peer.add_metadata(&old).unwrap();
    assert_eq!(pair.peer.region("kv", SOON).unwrap().len(), 8192);
    pair.target.withdraw("kv");
    while !pair.peer.regions().is_empty() {
        std::thread::yield_now();
    }
    pair.peer.add_metadata(&old).unwrap();
    assert!(pair.peer.regions().is_empty(), "it is withdrawn");
    // Nor for a peer that connects later.
    let other = Agent::new(&device(), "other", AgentOptions::default()).unwrap();
    let peer = other.connect(addr(&pair.target), SOON).unwrap();
    pair.target.export("new", &more).unwrap();
    peer.region("new", SOON).unwrap();
    peer.add_metadata(&old).unwrap();
    assert_eq!(peer.regions(), ["new"]);
}

#[test]
fn a_closed_agent_refuses_and_ends_everything() {
    let pair = Pair::new(4096, &AgentOptions::default());
    pair.initiator.close();
    let late = pair.peer.write_list(&pair.local, &pair.remote, &LIST, Notify::Nothing);
    assert!(matches!(late, Err(TransferError::PeerGone { reason: Gone::ClosedHere, .. })), "{late:?}");
    assert!(
        pair.initiator.connect(addr(&pair.target), SOON).is_ok_and(|peer| {
            peer.write_list(&pair.local, &pair.remote, &LIST, Notify::Nothing).is_err()
        })
    );
    pair.initiator.close();
}

/// As torch does: storage is given up while it is registered, and another tensor gets its address.
#[test]
fn each_view_keeps_its_own_memory_alive() {
    let agent = Agent::new(&device(), "one", AgentOptions::default()).unwrap();
    let mut buffer = vec![0_u8; 8192];
    let base = buffer.as_mut_ptr().expose_provenance() as u64;
    let register = |at: u64, len: usize, owner: &Arc<()>| {
        let memory =
            Foreign { addr: base + at, len, is_gpu: false, is_read_only: false, is_on_demand: false };
        // SAFETY: the buffer outlives all views, and is not used otherwise.
        unsafe { agent.register_raw(&memory, Some(Box::new(owner.clone()))).unwrap() }
    };
    let owners = [(), ()].map(Arc::new);
    let first = register(0, 8192, &owners[0]);
    let second = register(4096, 4096, &owners[1]);
    assert_eq!(first.region().mr().lkey(), second.region().mr().lkey());
    drop(first);
    let part = second.part(0, 1).unwrap();
    drop(second);
    assert_eq!(Arc::strong_count(&owners[1]), 2, "the part keeps it");
    drop(part);
    assert_eq!(owners.map(|owner| Arc::strong_count(&owner)), [1, 1]);
}

#[test]
fn a_small_view_does_not_hide_the_registration_around_it() {
    let agent = Agent::new(&device(), "one", AgentOptions::default()).unwrap();
    let mut buffer = vec![0_u8; 8192];
    let base = buffer.as_mut_ptr().expose_provenance() as u64;
    let register = |at: u64, len: usize| {
        let memory =
            Foreign { addr: base + at, len, is_gpu: false, is_read_only: false, is_on_demand: false };
        // SAFETY: the buffer outlives all views, and is not used otherwise.
        unsafe { agent.register_raw(&memory, None).unwrap() }
    };
    let (small, whole) = (register(1024, 16), register(0, 8192));
    let behind = register(2048, 4096);
    assert_ne!(small.region().mr().lkey(), whole.region().mr().lkey());
    assert_eq!(behind.region().mr().lkey(), whole.region().mr().lkey());
}

/// Host memory that was unmapped and mapped again is registered anew, though a view is left.
#[test]
fn memory_that_was_unmapped_is_not_found_again() {
    const LEN: usize = 1 << 20;
    let agent = Agent::new(&device(), "one", AgentOptions::default()).unwrap();
    let map = |addr: *mut libc::c_void, flags| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
        // SAFETY: new pages, or in place of those that were unmapped below.
        unsafe { libc::mmap(addr, LEN, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) }
    };
    let place = map(std::ptr::null_mut(), 0);
    let memory = Foreign {
        addr: place.expose_provenance() as u64,
        len: LEN,
        is_gpu: false,
        is_read_only: false,
        is_on_demand: false,
    };
    // SAFETY: transfers only use what is mapped; none is started.
    let register = || unsafe { agent.register_raw(&memory, None).unwrap() };
    let first = register();
    // SAFETY: mapped above; no reference to it exists.
    assert_eq!(unsafe { libc::munmap(place, LEN) }, 0);
    assert_eq!(map(place, libc::MAP_FIXED), place);
    if !first.region().mr().is_gone_at(0, LEN) {
        return; // the kernel does not let us watch memory here
    }
    assert_ne!(register().region().mr().lkey(), first.region().mr().lkey());
}
