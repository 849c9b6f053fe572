//! The named devices of this end, resolved once when the plan is made.

use nobounce::{AUTO, Device};

/// The variable that names them where no argument does.
pub(super) const VARIABLE: &str = "NOBOUNCE_DEVICE";

/// Devices of this end as named by `--device` or `NOBOUNCE_DEVICE`: one, or the rails of every
/// transfer (`mlx5_0,mlx5_1`). Empty selects the software NIC.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Named(Vec<String>);

impl Named {
    /// By the argument; without it, as the environment says.
    pub(super) fn of(argument: Option<&str>, environment: Option<&str>) -> Self {
        let names = argument.or(environment.filter(|names| !names.is_empty())).unwrap_or_default();
        Self(names.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect())
    }

    /// Their names, in the order of the rails.
    pub(super) fn names(&self) -> &[String] {
        &self.0
    }

    /// Whether the list is empty.
    pub(super) fn are_none(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether each transfer is split over several.
    pub(super) fn are_rails(&self) -> bool {
        self.0.len() > 1
    }

    /// Whether the choice is left to us.
    pub(super) fn are_auto(&self) -> bool {
        self.0 == [AUTO]
    }

    /// Whether one of them is hardware.
    pub(super) fn have_hardware(&self) -> bool {
        self.0.iter().any(|name| Device::is_hardware(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_argument_counts_before_the_environment_and_both_may_name_several() {
        let of = |argument, environment| Named::of(argument, environment).0.join("+");
        assert_eq!(of(Some("mlx5_0"), Some("rxe0")), "mlx5_0");
        assert_eq!(of(None, Some("rxe0, rxe1")), "rxe0+rxe1");
        assert_eq!(of(Some("nb0"), Some("rxe0,rxe1")), "nb0");
        assert!(Named::of(None, None).are_none() && Named::of(None, Some("")).are_none());
        assert!(Named::of(None, Some("a,b")).are_rails() && !Named::of(Some("a"), Some("a,b")).are_rails());
        assert!(Named::of(None, Some("auto")).are_auto() && !Named::of(Some("auto,b"), None).are_auto());
    }
}
