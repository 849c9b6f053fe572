//! Packages of Python that bring libraries of verbs or UCX of their own.

use super::list;
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{Facts, GpuVendor, Wheel, WheelVerbs};

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let facts = analysis.facts;
    let wheels = facts.libraries.wheels.known().map_or(&[][..], Vec::as_slice);
    if !analysis.has_hardware_nic() {
        return Vec::new();
    }
    wheels.iter().flat_map(|wheel| [verbs(facts, wheel), ucx(facts, wheel)]).flatten().collect()
}

fn title(wheel: &Wheel) -> String {
    match &wheel.version {
        Some(version) => format!("{} {version}", wheel.name),
        None => wheel.name.clone(),
    }
}

/// The provider for a driver of the kernel.
fn provider(driver: &str) -> Option<&'static str> {
    Some(match driver {
        "mlx5_core" | "mlx5_ib" => "mlx5",
        "mlx4_core" | "mlx4_ib" => "mlx4",
        "bnxt_en" | "bnxt_re" => "bnxt_re",
        "efa" => "efa",
        "irdma" | "ice" | "i40e" => "irdma",
        "erdma" => "erdma",
        "hns3" | "hns_roce_hw_v2" => "hns",
        "cxgb4" => "cxgb4",
        "ionic" | "ionic_rdma" => "ionic",
        _ => return None,
    })
}

/// Whether a package's libibverbs finds a provider; `None` where its private version is unknown.
fn finds(facts: &Facts, wheel: &Wheel, own: &WheelVerbs, wanted: &str) -> Option<bool> {
    if wheel.providers.iter().any(|name| name == wanted) {
        return Some(true);
    }
    let system = facts.libraries.providers.known()?;
    let named: Vec<u32> =
        system.iter().filter(|provider| provider.name == wanted).map(|provider| provider.abi).collect();
    if named.is_empty() {
        return Some(false);
    }
    own.abi.map(|abi| named.contains(&abi))
}

/// A libibverbs loads providers of its own private version only.
fn verbs(facts: &Facts, wheel: &Wheel) -> Option<Finding> {
    let own = wheel.verbs.as_ref()?;
    let nics = || facts.nics.iter().filter(|nic| !nic.is_software());
    let of = |wanted: Option<bool>| -> Vec<(&str, &'static str)> {
        nics()
            .filter_map(|nic| Some((nic.name.as_str(), provider(nic.driver.as_deref()?)?)))
            .filter(|(_, name)| finds(facts, wheel, own, name) == wanted)
            .collect()
    };
    let (without, unknown) = (of(Some(false)), of(None));
    let (hit, severity) = match (without.is_empty(), unknown.is_empty()) {
        (true, true) => return None,
        (true, false) => (unknown, Severity::Unknown),
        (false, _) => (without, Severity::Warning),
    };
    let names: Vec<&str> = hit.iter().map(|(nic, _)| *nic).collect();
    let provider = hit[0].1;
    let what = if severity == Severity::Unknown {
        format!("whether it finds the provider {provider} for {} is unknown", list(&names))
    } else {
        format!("it has no provider {provider} for {}", list(&names))
    };
    let version =
        own.abi.map_or_else(|| "private version unknown".to_owned(), |abi| format!("private version {abi}"));
    let system: Vec<String> = facts
        .libraries
        .providers
        .known()
        .into_iter()
        .flatten()
        .filter(|known| known.name == provider)
        .map(|known| format!("lib{}-rdmav{}.so", known.name, known.abi))
        .collect();
    let told = match (facts.libraries.providers.why_not(), system.is_empty()) {
        (Some(why), _) => why.to_owned(),
        (None, true) => format!("no lib{provider}-rdmav*.so"),
        (None, false) => list(&system),
    };
    Some(
        Finding::new("wheel-verbs", severity, format!("{} brings its own libibverbs, and {what}", title(wheel)))
            .why("A libibverbs loads providers of its own private version only. Without one the package sees no adapter and uses TCP, while ibv_devices of the system lists all.")
            .seen(own.file.clone(), version)
            .seen("providers of the system", told)
            .fix(Fix::container().run(format!("ln -sf \"$(ldconfig -p | awk '/libibverbs.so.1 /{{print $NF; exit}}')\" {}", own.file)).remark("the system's libibverbs in its place"))
            .on(names.into_iter().map(str::to_owned)),
    )
}

/// A UCX without the transports that this machine needs.
fn ucx(facts: &Facts, wheel: &Wheel) -> Option<Finding> {
    let modules = wheel.ucx.as_ref()?;
    // The first UCX that is found has findings of its own.
    let first = facts.libraries.ucx.known().and_then(Option::as_ref);
    if first.is_some_and(|ucx| ucx.modules == *modules) {
        return None;
    }
    let has = |begin: &str| modules.iter().any(|module| module.starts_with(begin));
    let nvidia = facts.gpus.iter().any(|gpu| gpu.vendor == GpuVendor::Nvidia);
    let lacks: Vec<&str> = [("ib", true), ("cuda", nvidia)]
        .into_iter()
        .filter(|(name, wanted)| *wanted && !has(name))
        .map(|(name, _)| name)
        .collect();
    if lacks.is_empty() {
        return None;
    }
    let name = wheel.name.replace('_', "-");
    Some(
        Finding::new("wheel-ucx", Severity::Warning, format!("{} brings its own UCX without {}", title(wheel), list(&lacks)))
            .why(if lacks.contains(&"ib") {
                "Without its ib module this UCX has only TCP and shared memory, whatever the system's UCX supports."
            } else {
                "Without its cuda module this UCX takes GPU pointers for host memory, whatever the system's UCX supports."
            })
            .seen("modules of its UCX", if modules.is_empty() { "none".to_owned() } else { modules.join(", ") })
            .fix(Fix::container().remark("build it against a UCX with them").run(format!("pip install --force-reinstall --no-binary {name} {name}"))),
    )
}
