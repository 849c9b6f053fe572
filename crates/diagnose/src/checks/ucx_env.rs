//! Settings and builds of UCX that defeat GPUDirect.

use super::settings::{dma_buf_off, left_out, relaxed, set, too_old};
use crate::finding::{Finding, Fix, Severity};
use crate::names::Filter;
use crate::ucx;
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::GpuVendor;
use nobounce_topology::platform::Platform;

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    if !analysis.has_hardware_nic() {
        return found;
    }
    transports(analysis, &mut found);
    devices(analysis, &mut found);
    switches(analysis, &mut found);
    build(analysis, &mut found);
    let version = analysis.facts.libraries.ucx.known().and_then(|ucx| ucx.as_ref()?.version.as_deref());
    found.extend(too_old(analysis, "ucx-too-old", "UCX", version, |pair| ucx::misses(analysis.facts, pair)));
    found
}

fn transports(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let Some(variable) = analysis.facts.variable("UCX_TLS") else { return };
    let allowed = ucx::transports(analysis.facts);
    if !allowed.ib {
        found.push(set(
            Finding::new("ucx-tls-no-ib", Severity::Error, format!("{variable} excludes the adapters"))
                .why("UCX uses TCP or shared memory only, without any error."),
            variable,
        ));
    }
    if !allowed.gpu && !analysis.facts.gpus.is_empty() {
        found.push(
            set(
                Finding::new("ucx-tls-no-gpu", Severity::Error, format!("{variable} excludes the GPU transports"))
                    .why("UCX does not recognise GPU memory: transfers crash, or the application stages them itself."),
                variable,
            )
            .fix(Fix::container().set("UCX_TLS=rc,cuda").remark("or leave it unset")),
        );
    }
}

fn devices(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let Some(variable) = analysis.facts.variable("UCX_NET_DEVICES") else { return };
    let filter = Filter::ucx(variable.value);
    let mut nics = analysis.facts.nics.iter().filter(|nic| !nic.is_software());
    if !nics.any(|nic| filter.takes(nic)) {
        found.push(set(
            Finding::new("ucx-devices-none", Severity::Error, format!("{variable} matches no adapter"))
                .why("UCX uses the interface over TCP. Adapters are named with their port: mlx5_0:1."),
            variable,
        ));
        return;
    }
    let bare: Vec<&str> = filter
        .without_port()
        .into_iter()
        .filter(|name| analysis.facts.nics.iter().any(|nic| nic.name == *name))
        .collect();
    if !bare.is_empty() {
        let name = |name: &str| {
            if bare.contains(&name.trim()) { format!("{}:1", name.trim()) } else { name.to_owned() }
        };
        let with_ports = variable.value.split(',').map(name).collect::<Vec<_>>().join(",");
        found.push(
            Finding::new(
                "ucx-devices-port",
                Severity::Warning,
                format!("UCX_NET_DEVICES names {} without a port", super::list(&bare)),
            )
            .why("UCX expects adapter names with their port: a name alone matches nothing.")
            .seen(variable.source, format!("UCX_NET_DEVICES={}", variable.value))
            .fix(Fix::container().set(format!("UCX_NET_DEVICES={with_ports}"))),
        );
    }
    found.extend(left_out(analysis, variable, &filter, "ucx-devices-far", "UCX"));
}

fn switches(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    if ucx::is_off(facts, "UCX_IB_GPU_DIRECT_RDMA")
        && let Some(variable) = facts.variable("UCX_IB_GPU_DIRECT_RDMA")
    {
        found.push(set(
            Finding::new("ucx-gpu-direct", Severity::Error, format!("{variable} disables GPUDirect in UCX"))
                .why("GPU memory is staged through the host."),
            variable,
        ));
    }
    if ucx::is_off(facts, "UCX_CUDA_COPY_DMABUF")
        && let Some(variable) = facts.variable("UCX_CUDA_COPY_DMABUF")
    {
        let pairs: Vec<_> = analysis.pairs.iter().filter(|pair| !pair.nic.is_software()).collect();
        found.push(dma_buf_off("ucx-dmabuf", "UCX", variable, analysis, &pairs));
    }
    if ucx::is_off(facts, "UCX_IB_PCI_RELAXED_ORDERING")
        && let Some(variable) = facts.variable("UCX_IB_PCI_RELAXED_ORDERING")
    {
        found.push(relaxed(analysis, variable));
    } else if facts.variable("UCX_IB_PCI_RELAXED_ORDERING").is_none() {
        old_default(analysis, found);
    }
    if let Some(variable) = ucx::staging_scheme(facts)
        && !facts.gpus.is_empty()
    {
        found.push(set(
            Finding::new("ucx-rndv-scheme", Severity::Warning, format!("{variable} makes UCX stage long messages"))
                .why("The pipeline and active messages copy GPU memory through host buffers; get_zcopy and put_zcopy do not."),
            variable,
        ));
    }
    if ucx::is_off(facts, "UCX_IB_PREFER_NEAREST_DEVICE")
        && let Some(variable) = facts.variable("UCX_IB_PREFER_NEAREST_DEVICE")
        && facts.nics.len() > 1
    {
        found.push(
            set(
                Finding::new(
                    "ucx-nearest",
                    Severity::Warning,
                    format!("{variable}: UCX may use a distant adapter"),
                )
                .why("GPUs use adapters across the processor although a near one exists."),
                variable,
            )
            .slows()
            .on(facts.gpus.iter().map(|gpu| gpu.address.clone())),
        );
    }
}

/// UCX before 1.21 does not know that Emerald Rapids wants relaxed ordering, nor that Zen does
/// before 1.13.
fn old_default(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let Some(version) = ucx::version(facts) else { return };
    let platform = Platform::of(&facts.machine.cpu);
    let since = match platform {
        Platform::EmeraldRapids => (1, 21),
        Platform::Zen => (1, 13),
        _ => return,
    };
    let fast = facts.nics.iter().filter_map(|nic| nic.port()?.rate_gbps.known().copied()).fold(0.0, f64::max)
        > 150.0;
    if version >= since || !fast || facts.gpus.is_empty() {
        return;
    }
    let (major, minor) = version;
    found.push(
        Finding::new(
            "ucx-relaxed-default",
            Severity::Warning,
            format!("UCX {major}.{minor} does not use relaxed ordering on {}", platform.name()),
        )
        .why("Writes in strict order wait for each other there, whatever the link could carry.")
        .seen("UCX", format!("{major}.{minor}"))
        .seen("processor", facts.machine.cpu.name.clone())
        .fix(
            Fix::container()
                .set("UCX_IB_PCI_RELAXED_ORDERING=on")
                .remark(format!("or UCX {}.{} and newer", since.0, since.1)),
        ),
    );
}

fn build(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let Some(Some(ucx)) = facts.libraries.ucx.known() else { return };
    if ucx.modules.is_empty() {
        return;
    }
    let has = |begin: &str| ucx.modules.iter().any(|module| module.starts_with(begin));
    let uses_ucx = facts.variables().any(|variable| variable.name.starts_with("UCX_"));
    // Where no NCCL is found, UCX is what moves the bytes.
    let alone = !matches!(facts.libraries.nccl.known(), Some(Some(_)));
    let severity = match (uses_ucx, alone) {
        (true, _) => Severity::Error,
        (false, true) => Severity::Warning,
        (false, false) => Severity::Info,
    };
    if !has("ib") {
        found.push(
            Finding::new("ucx-no-verbs", severity, "this machine's UCX was built without verbs")
                .why("It supports only TCP and shared memory, and reports no error: a transfer took 1803 ms instead of 3.")
                .seen("UCX modules", ucx.modules.join(" "))
                .fix(Fix::container().remark("install UCX with its ib module (ucx-ib of the distribution), or build it with --with-verbs")),
        );
    }
    let vendor = facts.gpus.first().map(|gpu| gpu.vendor);
    let wanted = match vendor {
        Some(GpuVendor::Nvidia) => "cuda",
        Some(GpuVendor::Amd) => "rocm",
        _ => return,
    };
    if !has(wanted) {
        found.push(
            Finding::new("ucx-no-gpu", severity, format!("this machine's UCX was built without {wanted}"))
                .why("It does not recognise GPU memory: transfers crash or are staged by the application.")
                .seen("UCX modules", ucx.modules.join(" "))
                .fix(Fix::container().remark(format!("install UCX with its {wanted} module (ucx-{wanted}), or build it with --with-{wanted}; if it is installed in another folder (Python wheels), name that in UCX_MODULE_DIR"))),
        );
    }
}
