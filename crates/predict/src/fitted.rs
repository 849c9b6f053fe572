//! The constants that published figures decide. Each has a range from its mechanism; the value
//! within it is the one that explains most sources.

use super::constants as c;

macro_rules! fitted {
    ($($field:ident: $constant:ident, $range:expr;)*) => {
        /// One value of each fitted constant. [`super::constants`] documents them.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs, reason = "the constants have the words")]
        pub struct Fitted {
            $(pub $field: f64,)*
        }

        impl Default for Fitted {
            fn default() -> Self {
                Self { $($field: c::$constant,)* }
            }
        }

        /// A fitted constant: its name, its place, and the values that its mechanism allows.
        pub(super) struct Range {
            pub(super) name: &'static str,
            pub(super) place: fn(&mut Fitted) -> &mut f64,
            pub(super) values: &'static [f64],
        }

        pub(super) const RANGES: &[Range] = &[$(Range {
            name: stringify!($constant),
            place: |fitted| &mut fitted.$field,
            values: &$range,
        }),*];
    };
}

fitted! {
    series_exponent: SERIES_EXPONENT, [8.0, 12.0, 16.0, 24.0, 32.0];
    lone_flow: LONE_FLOW, [0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0];
    verbs_gap: VERBS_GAP, [0.05, 0.075, 0.1, 0.125, 0.15, 0.2, 0.25];
    mpi_call: MPI_CALL, [0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5];
    mpi_gap: MPI_GAP, [0.1, 0.15, 0.2, 0.25, 0.3, 0.4];
    device_call: DEVICE_CALL, [0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8];
    nixl_call: NIXL_CALL, [2.0, 3.0, 4.0, 5.0, 6.0, 8.0];
}

impl Fitted {
    /// The middle of every range: what is known without any published figure.
    #[must_use]
    pub fn unknown() -> Self {
        let mut found = Self::default();
        for range in RANGES {
            *(range.place)(&mut found) = range.values[range.values.len() / 2];
        }
        found
    }
}
