//! Queue pair states, and the table of transitions with the attributes each needs and allows.

use bitflags::bitflags;

pub use crate::wire::Service;

bitflags! {
    /// Which attributes a modify call carries. The bits are those of the verbs interface.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct AttrMask: u32 {
        #[allow(missing_docs)] const STATE = 1 << 0;
        #[allow(missing_docs)] const CUR_STATE = 1 << 1;
        #[allow(missing_docs)] const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        #[allow(missing_docs)] const ACCESS_FLAGS = 1 << 3;
        #[allow(missing_docs)] const PKEY_INDEX = 1 << 4;
        #[allow(missing_docs)] const PORT = 1 << 5;
        #[allow(missing_docs)] const QKEY = 1 << 6;
        #[allow(missing_docs)] const AV = 1 << 7;
        #[allow(missing_docs)] const PATH_MTU = 1 << 8;
        #[allow(missing_docs)] const TIMEOUT = 1 << 9;
        #[allow(missing_docs)] const RETRY_CNT = 1 << 10;
        #[allow(missing_docs)] const RNR_RETRY = 1 << 11;
        #[allow(missing_docs)] const RQ_PSN = 1 << 12;
        #[allow(missing_docs)] const MAX_QP_RD_ATOMIC = 1 << 13;
        #[allow(missing_docs)] const MIN_RNR_TIMER = 1 << 15;
        #[allow(missing_docs)] const SQ_PSN = 1 << 16;
        #[allow(missing_docs)] const MAX_DEST_RD_ATOMIC = 1 << 17;
        #[allow(missing_docs)] const DEST_QPN = 1 << 20;
    }
}

impl AttrMask {
    /// The names of the attributes in the mask, as the verbs interface spells them.
    pub fn names(self) -> String {
        let names: Vec<&str> = self.iter_names().map(|(name, _)| name).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(" | ") }
    }
}

/// The state of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum QpState {
    /// New or reset: no work is accepted.
    #[default]
    Reset,
    /// Receives may be posted.
    Init,
    /// Ready to receive: the responder works.
    Rtr,
    /// Ready to send: the requester works too.
    Rts,
    /// Send queue drained: started work completes, nothing new starts.
    Sqd,
    /// Send queue error (unconnected services only).
    Sqe,
    /// Everything posted is flushed.
    Error,
}

impl QpState {
    /// Every state.
    pub const ALL: [Self; 7] =
        [Self::Reset, Self::Init, Self::Rtr, Self::Rts, Self::Sqd, Self::Sqe, Self::Error];
}

/// Why a transition was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransitionError {
    /// There is no such transition.
    #[error("a {service:?} queue pair cannot go from {from:?} to {to:?}")]
    NoSuchTransition {
        #[allow(missing_docs)]
        service: Service,
        #[allow(missing_docs)]
        from: QpState,
        #[allow(missing_docs)]
        to: QpState,
    },
    /// The transition exists, but the attributes do not fit it.
    #[error(
        "{from:?} to {to:?}: missing attributes: {}; attributes not allowed here: {}",
        .missing.names(),
        .not_allowed.names()
    )]
    Attributes {
        #[allow(missing_docs)]
        from: QpState,
        #[allow(missing_docs)]
        to: QpState,
        /// Needed, but not given.
        missing: AttrMask,
        /// Given, but not allowed.
        not_allowed: AttrMask,
    },
    /// The caller's idea of the current state is wrong.
    #[error("the caller says the queue pair is in {said:?}, but it is in {actual:?}")]
    CurrentState {
        #[allow(missing_docs)]
        said: QpState,
        #[allow(missing_docs)]
        actual: QpState,
    },
    /// An attribute has a value outside its range.
    #[error("attribute {name} is {value}, which is outside 0..={max}")]
    Value {
        #[allow(missing_docs)]
        name: &'static str,
        #[allow(missing_docs)]
        value: u64,
        #[allow(missing_docs)]
        max: u64,
    },
}

struct Rule {
    from: QpState,
    to: QpState,
    required: AttrMask,
    optional: AttrMask,
}

const fn rule(from: QpState, to: QpState, required: AttrMask, optional: AttrMask) -> Rule {
    Rule { from, to, required, optional }
}

const NONE: AttrMask = AttrMask::empty();
const fn all(masks: &[AttrMask]) -> AttrMask {
    let mut bits = 0;
    let mut i = 0;
    while i < masks.len() {
        bits |= masks[i].bits();
        i += 1;
    }
    AttrMask::from_bits_truncate(bits)
}

use AttrMask as A;
use QpState::{Error, Init, Reset, Rtr, Rts, Sqd, Sqe};

/// The transitions of the InfiniBand specification. `any -> Reset` and `any -> Error` need nothing
/// and are not listed.
const fn rules(service: Service) -> &'static [Rule] {
    match service {
        Service::Rc | Service::XrcInitiator | Service::XrcTarget => RC,
        Service::Uc => UC,
        Service::Ud => UD,
    }
}

/// The attributes of RC that only the other end of an XRC connection needs; they may be given.
const fn of_other_end(service: Service) -> AttrMask {
    match service {
        Service::XrcInitiator => all(&[A::MAX_DEST_RD_ATOMIC, A::MIN_RNR_TIMER]),
        Service::XrcTarget => all(&[A::RETRY_CNT, A::RNR_RETRY, A::MAX_QP_RD_ATOMIC]),
        _ => NONE,
    }
}

const RC: &[Rule] = &[
    rule(Reset, Init, all(&[A::PKEY_INDEX, A::PORT, A::ACCESS_FLAGS]), NONE),
    rule(Init, Init, NONE, all(&[A::PKEY_INDEX, A::PORT, A::ACCESS_FLAGS])),
    rule(
        Init,
        Rtr,
        all(&[A::AV, A::PATH_MTU, A::DEST_QPN, A::RQ_PSN, A::MAX_DEST_RD_ATOMIC, A::MIN_RNR_TIMER]),
        all(&[A::ACCESS_FLAGS, A::PKEY_INDEX]),
    ),
    rule(
        Rtr,
        Rts,
        all(&[A::TIMEOUT, A::RETRY_CNT, A::RNR_RETRY, A::SQ_PSN, A::MAX_QP_RD_ATOMIC]),
        all(&[A::CUR_STATE, A::ACCESS_FLAGS, A::MIN_RNR_TIMER]),
    ),
    rule(Rts, Rts, NONE, all(&[A::CUR_STATE, A::ACCESS_FLAGS, A::MIN_RNR_TIMER])),
    rule(Rts, Sqd, NONE, A::EN_SQD_ASYNC_NOTIFY),
    rule(Sqd, Rts, NONE, all(&[A::CUR_STATE, A::ACCESS_FLAGS, A::MIN_RNR_TIMER])),
    rule(
        Sqd,
        Sqd,
        NONE,
        all(&[
            A::PKEY_INDEX,
            A::PORT,
            A::AV,
            A::TIMEOUT,
            A::RETRY_CNT,
            A::RNR_RETRY,
            A::MAX_QP_RD_ATOMIC,
            A::MAX_DEST_RD_ATOMIC,
            A::ACCESS_FLAGS,
            A::MIN_RNR_TIMER,
        ]),
    ),
];

const UC: &[Rule] = &[
    rule(Reset, Init, all(&[A::PKEY_INDEX, A::PORT, A::ACCESS_FLAGS]), NONE),
    rule(Init, Init, NONE, all(&[A::PKEY_INDEX, A::PORT, A::ACCESS_FLAGS])),
    rule(
        Init,
        Rtr,
        all(&[A::AV, A::PATH_MTU, A::DEST_QPN, A::RQ_PSN]),
        all(&[A::ACCESS_FLAGS, A::PKEY_INDEX]),
    ),
    rule(Rtr, Rts, A::SQ_PSN, all(&[A::CUR_STATE, A::ACCESS_FLAGS])),
    rule(Rts, Rts, NONE, all(&[A::CUR_STATE, A::ACCESS_FLAGS])),
    rule(Rts, Sqd, NONE, A::EN_SQD_ASYNC_NOTIFY),
    rule(Sqd, Rts, NONE, all(&[A::CUR_STATE, A::ACCESS_FLAGS])),
    rule(Sqd, Sqd, NONE, all(&[A::AV, A::ACCESS_FLAGS, A::PKEY_INDEX])),
    rule(Sqe, Rts, NONE, all(&[A::CUR_STATE, A::ACCESS_FLAGS])),
];

const UD: &[Rule] = &[
    rule(Reset, Init, all(&[A::PKEY_INDEX, A::PORT, A::QKEY]), NONE),
    rule(Init, Init, NONE, all(&[A::PKEY_INDEX, A::PORT, A::QKEY])),
    rule(Init, Rtr, NONE, all(&[A::PKEY_INDEX, A::QKEY])),
    rule(Rtr, Rts, A::SQ_PSN, all(&[A::CUR_STATE, A::QKEY])),
    rule(Rts, Rts, NONE, all(&[A::CUR_STATE, A::QKEY])),
    rule(Rts, Sqd, NONE, A::EN_SQD_ASYNC_NOTIFY),
    rule(Sqd, Rts, NONE, all(&[A::CUR_STATE, A::QKEY])),
    rule(Sqd, Sqd, NONE, all(&[A::PKEY_INDEX, A::QKEY])),
    rule(Sqe, Rts, NONE, all(&[A::CUR_STATE, A::QKEY])),
];

/// Checks a transition against the table.
///
/// # Errors
/// Says that there is no such transition, or which attributes are missing or not allowed.
pub fn check_transition(
    service: Service,
    from: QpState,
    to: QpState,
    given: AttrMask,
) -> Result<(), TransitionError> {
    let given = given - AttrMask::STATE;
    let (required, optional) = match to {
        Reset | Error => (NONE, AttrMask::CUR_STATE),
        _ => rules(service)
            .iter()
            .find(|r| r.from == from && r.to == to)
            .map(|r| (r.required, r.optional))
            .ok_or(TransitionError::NoSuchTransition { service, from, to })?,
    };
    let missing = required - of_other_end(service) - given;
    let not_allowed = given - required - optional;
    if missing.is_empty() && not_allowed.is_empty() {
        Ok(())
    } else {
        Err(TransitionError::Attributes { from, to, missing, not_allowed })
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    fn whole_table(service: Service) -> String {
        let mut table = String::new();
        for from in QpState::ALL {
            for to in QpState::ALL {
                let line = match check_transition(service, from, to, AttrMask::STATE) {
                    Err(TransitionError::NoSuchTransition { .. }) => "-".to_owned(),
                    Ok(()) => "ok, needs nothing".to_owned(),
                    Err(TransitionError::Attributes { missing, .. }) => {
                        format!("ok, needs {}", missing.names())
                    }
                    Err(other) => other.to_string(),
                };
                let everything = check_transition(service, from, to, AttrMask::all());
                let refused = match everything {
                    Err(TransitionError::Attributes { not_allowed, .. }) => {
                        format!("; allows {}", (AttrMask::all() - not_allowed - AttrMask::STATE).names())
                    }
                    _ => String::new(),
                };
                writeln!(table, "{:<12} {line}{refused}", format!("{from:?}->{to:?}")).unwrap();
            }
        }
        table
    }

    #[test]
    fn the_whole_tables() {
        insta::assert_snapshot!("rc_transitions", whole_table(Service::Rc));
        insta::assert_snapshot!("uc_transitions", whole_table(Service::Uc));
        insta::assert_snapshot!("ud_transitions", whole_table(Service::Ud));
    }

    #[test]
    fn a_refusal_names_the_attributes() {
        let given = AttrMask::STATE | AttrMask::AV | AttrMask::TIMEOUT;
        let error = check_transition(Service::Rc, Init, Rtr, given).unwrap_err();
        assert_eq!(
            error.to_string(),
            "Init to Rtr: missing attributes: PATH_MTU | RQ_PSN | MIN_RNR_TIMER | MAX_DEST_RD_ATOMIC | DEST_QPN; \
             attributes not allowed here: TIMEOUT"
        );
    }
}
