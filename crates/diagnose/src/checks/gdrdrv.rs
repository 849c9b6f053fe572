//! gdrdrv and nvidia_peermem against NVIDIA's module and libgdrapi: versions and flavours.

use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{Facts, Gdrdrv, NvidiaModule, version_pair};

/// The first version of each that opens the other.
const FIRST: (u32, u32) = (2, 0);
/// Calls of libgdrapi that need a newer module than [`FIRST`].
const CALLS: [((u32, u32), &str); 2] =
    [((2, 4), "gdr_get_info_v2"), ((2, 5), "gdr_pin_buffer_v2 and the choice of mapping types")];
const RELOAD: &str =
    "sudo apt install --reinstall gdrdrv-dkms && sudo modprobe -r gdrdrv && sudo modprobe gdrdrv";

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let facts = analysis.facts;
    let mut found = Vec::new();
    let nvidia = facts.kernel.nvidia.known().and_then(Option::as_ref);
    let module = facts.kernel.gdrdrv.known().and_then(Option::as_ref);
    if let Some(module) = module {
        found.extend(nvidia.and_then(|nvidia| flavour(facts, module, nvidia)));
        found.extend(version(facts, module));
    }
    found.extend(nvidia.and_then(|nvidia| peermem(facts, nvidia)));
    found
}

fn name(open: bool) -> &'static str {
    if open { "open" } else { "proprietary" }
}

/// The flavour that gdrdrv was built for: by its parameters, else by the line of its start.
fn built_for(facts: &Facts, module: &Gdrdrv) -> Option<(bool, &'static str)> {
    let started = |line: &&String| line.contains("loading gdrdrv") || line.contains("gdrdrv_init");
    let logged =
        || facts.kernel.log.known()?.iter().rev().find(started).and_then(|line| Gdrdrv::flavour(line));
    let told = module.open.map(|open| (open, "/proc/driver/gdrdrv/params"));
    told.or_else(|| logged().map(|open| (open, "kernel log")))
}

/// gdrdrv is built for one flavour of NVIDIA's module: it uses other functions of the kernel for
/// each.
fn flavour(facts: &Facts, module: &Gdrdrv, nvidia: &NvidiaModule) -> Option<Finding> {
    let loaded = nvidia.open?;
    // On coherent machines the flavour decides how memory is mapped.
    let coherent = facts.gpus.iter().any(|gpu| gpu.coherent_link.get() == Some(true));
    let Some((built, source)) = built_for(facts, module) else {
        return coherent.then(|| {
            Finding::new(
                "gdrdrv-flavour",
                Severity::Unknown,
                "the flavour of NVIDIA's module that gdrdrv was built for is unknown",
            )
            .why(
                "Built for the proprietary flavour it maps memory of this GPU uncached, and copies are slow.",
            )
            .seen("/proc/driver/gdrdrv/params", "no flavour: gdrdrv before 2.5, or hidden by a container")
            .fix(Fix::host().run("sudo dmesg | grep 'loading gdrdrv'"))
            .root()
        });
    };
    if built == loaded {
        return None;
    }
    let (severity, why) = match (built, coherent) {
        (true, _) => (
            Severity::Warning,
            "It uses functions of the kernel that are closed to modules which depend on the proprietary one: kernels from 5.9 on refuse to load it again, and GDRCopy is gone after the next boot.",
        ),
        (false, true) => (
            Severity::Warning,
            "Built for the proprietary flavour it does not recognise memory that the CPU may cache: GDRCopy maps this GPU uncached, and copies are slow.",
        ),
        (false, false) => (
            Severity::Info,
            "GDRCopy works. Its test for cacheable memory is an approximation, and confidential computing on Intel is not supported in full.",
        ),
    };
    let (built, loaded) = (name(built), name(loaded));
    Some(
        Finding::new(
            "gdrdrv-flavour",
            severity,
            format!(
                "gdrdrv was built for the {built} flavour of NVIDIA's module, and the {loaded} one is loaded"
            ),
        )
        .why(why)
        .seen(source, format!("built for the {built} flavour"))
        .seen("/proc/driver/nvidia/version", format!("{}, {loaded}", nvidia.version))
        .fix(
            Fix::host()
                .run(RELOAD)
                .remark("it is built for the sources in /usr/src/nvidia-*: remove those of other versions"),
        )
        .root(),
    )
}

/// The library and the module of GDRCopy check each other's version when the device is opened.
fn version(facts: &Facts, module: &Gdrdrv) -> Option<Finding> {
    let library = facts.libraries.gdrapi.known()?.as_ref()?.version.as_deref()?;
    let driver = module.version.as_deref()?;
    let (of_library, of_driver) = (version_pair(library)?, version_pair(driver)?);
    let finding = |severity, what: &str| {
        Finding::new("gdrdrv-version", severity, format!("libgdrapi {library} with gdrdrv {driver}: {what}"))
            .seen("libgdrapi.so.2", library)
            .seen("/sys/module/gdrdrv/version", driver)
    };
    if of_library < FIRST || of_driver < FIRST || of_library.0 != of_driver.0 {
        return Some(
            finding(Severity::Warning, "the one does not open the other")
                .why("gdr_open fails: UCX and NVSHMEM use slow copies for short messages.")
                .fix(Fix::host().run(RELOAD).remark("and the same version of libgdrapi in the image"))
                .root(),
        );
    }
    let missing: Vec<&str> = CALLS
        .iter()
        .filter(|(since, _)| of_library >= *since && of_driver < *since)
        .map(|(_, calls)| *calls)
        .collect();
    if missing.is_empty() {
        return None;
    }
    Some(
        finding(Severity::Info, "the module is older")
            .why(format!("GDRCopy works without {}.", missing.join(", ")))
            .fix(Fix::host().run(RELOAD))
            .root(),
    )
}

/// nvidia_peermem carries the version of the driver that it was built with.
fn peermem(facts: &Facts, nvidia: &NvidiaModule) -> Option<Finding> {
    let module = facts.kernel.modules.known()?.get("nvidia_peermem")?.version.as_deref()?;
    if module == nvidia.version {
        return None;
    }
    Some(
        Finding::new("peermem-version", Severity::Warning, format!("nvidia_peermem {module} is loaded beside nvidia {}", nvidia.version))
            .why("The module uses functions of the driver that it was built with. Registrations can fail or end in callbacks without a context, and the next boot may refuse the module.")
            .seen("/sys/module/nvidia_peermem/version", module)
            .seen("/proc/driver/nvidia/version", nvidia.version.clone())
            .fix(Fix::host().run("sudo modprobe -r nvidia_peermem; sudo modprobe nvidia_peermem").remark("if the version stays, reinstall the driver").run("sudo dkms autoinstall --force"))
            .root(),
    )
}
