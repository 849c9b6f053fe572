//! The environment of the command. docs/reference/environment.md has the same list; keep both in
//! sync.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::args::RunArgs;
use super::dropin;

/// What a run gives its processes.
#[derive(Debug)]
pub(crate) struct Given<'a> {
    /// The drop-in libraries.
    pub(crate) dropin: &'a Path,
    /// What stands for / where InfiniBand folders are looked for.
    pub(crate) view: &'a Path,
    /// Where devices leave their totals.
    pub(crate) report: &'a Path,
    /// How many GPUs the machine has.
    pub(crate) gpus: usize,
    /// How many engines a device has at most.
    pub(crate) engines: usize,
    /// How many devices there are, nb0 and so on.
    pub(crate) devices: usize,
    /// CPUs that the command may use.
    pub(crate) cpus: usize,
    /// All devices have loopback addresses.
    pub(crate) is_loopback: bool,
    /// The machine has RDMA adapters of its own.
    pub(crate) adapters: bool,
    /// Every NCCL that the command may load takes libnccl-gin.so of the drop-in folder by itself.
    pub(crate) has_gpi: bool,
}

/// How many GPUs NVIDIA's driver knows here.
pub(crate) fn gpus() -> usize {
    std::fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, Iterator::count)
}

/// A variable of the command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Variable {
    pub(crate) name: &'static str,
    pub(crate) value: OsString,
    /// Why it is set.
    pub(crate) reason: &'static str,
}

/// Set unless the user has set them: name, value, reason.
const DEFAULTS: [(&str, &str, &str); 2] = [
    ("NOBOUNCE_LINK", "auto", "use shared memory between processes of one machine"),
    (
        "NCCL_NET_GDR_LEVEL",
        "SYS",
        "nb0 is attached to the CPU, farther from any GPU than NCCL's default limit for GPUDirect (PXB)",
    ),
];

/// The same, where the command may load an NCCL without plugins of type GPI.
const GIN_TYPE: (&str, &str, &str) = (
    "NCCL_GIN_TYPE",
    "2",
    "NCCL 2.28.7 and 2.28.9 crash when they choose a GIN type without an mlx5 adapter; 2 is the proxy",
);

/// cuFile's settings, in the folder of the run: an empty object.
pub(crate) const CUFILE_JSON: &str = "cufile.json";

/// With fewer CPUs than this, programs that poll with several threads compete with themselves.
const FEW_CPUS: usize = 4;

/// The same, for UCX, on machines without other adapters for it.
const UCX: [(&str, &str, &str); 2] = [
    ("UCX_FENCE_MODE", "weak", "the default fence of UCX 1.20 and later fails on adapters other than mlx5"),
    ("UCX_WARN_UNUSED_ENV_VARS", "n", "not every release of UCX knows the variables above"),
];

/// The same, on machines with GPUs.
fn for_gpus(
    given: &Given<'_>,
    now: impl Fn(&str) -> Option<OsString>,
) -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    // A copy that shares a hardware queue with work behind NCCL's kernel deadlocks, since that
    // kernel waits for the copy. (Not by default: a GPU has a limited number for all its
    // processes.)
    let is_copied = now("NOBOUNCE_WINDOW").is_some_and(|window| window == "off");
    let queues = (given.gpus > 0 && is_copied).then_some((
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "32",
        "without BAR1 windows the copy engine moves all bytes; its copies must not queue behind NCCL's kernels",
    ));
    // Kernels of NCCL's GIN poll words of its proxy. Where those lie in host memory, the polling
    // takes most of the bus: puts of 8 MiB were 7 times slower on an H200.
    let words = (given.gpus > 0 && !is_copied).then_some((
        "NCCL_GDRCOPY_ENABLE",
        "1",
        "what NCCL's kernels poll is kept in GPU memory, by this libgdrapi; in host memory the polling slows transfers",
    ));
    // Four channels quarter the messages, and the device has a cost per message. Two keep several
    // engines busy. (Several GPUs need their channels for traffic among themselves.)
    let most = if given.engines > 1 { "2" } else { "1" };
    let channels = (given.gpus == 1).then_some((
        "NCCL_MAX_NCHANNELS",
        most,
        "with one GPU every channel is a network flow; fewer flows carry longer messages",
    ));
    queues.into_iter().chain(words).chain(channels)
}

/// What is wrong with what the user has set, if anything.
pub(crate) fn warning(now: impl Fn(&str) -> Option<OsString>) -> Option<String> {
    let asked = now("NCCL_PROTO")?.to_string_lossy().to_ascii_uppercase();
    // A list for all collectives or for one (`allreduce:LL`), separated by semicolons. `^` means
    // all but those named, which also counts as a request.
    let forced = asked.split(';').any(|part| {
        let list = part.rsplit(':').next().unwrap_or_default().trim();
        let (list, wanted) = list.strip_prefix('^').map_or((list, true), |others| (others, false));
        !list.is_empty() && list.split(',').any(|protocol| protocol.trim() == "LL128") == wanted
    });
    forced.then(|| {
        format!(
            "NCCL_PROTO={asked} enables LL128, which requires 128-byte stores to arrive whole. In GPU memory nb0 guarantees that \
             for 8-byte words only, so NCCL may read torn data. Unset NCCL_PROTO, or remove LL128 (LL,Simple)"
        )
    })
}

/// Everything to set, given what is set now.
pub(crate) fn variables(
    args: &RunArgs,
    given: &Given<'_>,
    now: impl Fn(&str) -> Option<OsString>,
) -> Vec<Variable> {
    let variable = |name, value, reason| Variable { name, value, reason };
    let verbs = in_front(&given.dropin.join(dropin::VERBS), now("LD_PRELOAD"));
    let preload = in_front(&given.dropin.join(dropin::PRELOAD), Some(verbs));
    let is_off = now("NOBOUNCE_VMM_EXPORT").is_some_and(|value| value == "off");
    let preload = match given.dropin.join(dropin::VMM) {
        vmm if given.gpus > 0 && !is_off => in_front(&vmm, Some(preload)),
        _ => preload,
    };
    let preload = match args.cufile {
        true => in_front(&given.dropin.join(dropin::CUFILE), Some(preload)),
        false => preload,
    };
    let mut all = vec![
        variable(
            "LD_LIBRARY_PATH",
            in_front(given.dropin, now("LD_LIBRARY_PATH")),
            "load the drop-in libibverbs, librdmacm and libgdrapi first",
        ),
        variable(
            "LD_PRELOAD",
            preload,
            "show nb0 in the InfiniBand directories of sysfs, and to wheels that bring a libibverbs of another name; with GPUs, make \
             memory of cuMemCreate exportable, which a window onto it needs",
        ),
        variable("NOBOUNCE_VIEW", given.view.into(), "directory of that sysfs view"),
        variable("NOBOUNCE_REPORT", given.report.into(), "directory for the reports of the devices"),
    ];
    let typed = [
        ("NOBOUNCE_ADDR", args.addr.as_ref().map(OsString::from)),
        ("NOBOUNCE_FAULT", args.fault.as_ref().map(OsString::from)),
        ("NOBOUNCE_LINK", args.link.as_ref().map(OsString::from)),
        ("NOBOUNCE_ENGINES", args.engines.map(|engines| engines.to_string().into())),
        ("NOBOUNCE_PROGRESS", args.progress.as_ref().map(OsString::from)),
        ("NOBOUNCE_PCAP", args.pcap.as_deref().map(|path| capture(path).into_os_string())),
        ("NOBOUNCE_REQUIRE", args.require.as_ref().map(OsString::from)),
        ("NOBOUNCE_LOG", args.log.as_ref().map(OsString::from)),
    ];
    all.extend(
        typed
            .into_iter()
            .filter_map(|(name, value)| Some(variable(name, value?, "set by an option of nobounce run"))),
    );
    // Programs take the name of a CUDA transport as a sign that there is a GPU.
    let transports = (
        "UCX_TLS",
        if given.gpus > 0 { "rc_verbs,ud_verbs,cuda_copy,self" } else { "rc_verbs,ud_verbs,self" },
        "use nb0 for all peers; UCX_TLS=all adds shared memory and CUDA IPC within the machine",
    );
    let ucx = std::iter::once(transports).chain(UCX).filter(|_| !given.adapters);
    let gin = (!given.has_gpi).then_some(GIN_TYPE);
    let missing = DEFAULTS.into_iter().chain(gin).chain(for_gpus(given, &now)).chain(ucx);
    for (name, value, reason) in missing {
        if now(name).is_none() && !all.iter().any(|set| set.name == name) {
            all.push(variable(name, value.into(), reason));
        }
    }
    if args.cufile {
        let settings = given.report.with_file_name(CUFILE_JSON).into();
        let kvikio = "KvikIO would read files itself where it finds no nvidia-fs";
        let asked = [
            ("KVIKIO_COMPAT_MODE", "OFF".into(), kvikio),
            (
                "CUFILE_ENV_PATH_JSON",
                settings,
                "KvikIO uses streams only where cuFile has a file of settings",
            ),
        ];
        let missing = asked.into_iter().filter(|(name, ..)| now(name).is_none());
        all.extend(missing.map(|(name, value, reason)| variable(name, value, reason)));
    }
    if given.cpus < FEW_CPUS && now("MC_WORKERS_PER_CTX").is_none() {
        let reason = "two threads of Mooncake that poll without pause leave too little of so few CPUs";
        all.push(variable("MC_WORKERS_PER_CTX", "1".into(), reason));
    }
    // libfabric does not use verbs devices on loopback.
    if !given.adapters && !given.is_loopback && now("I_MPI_OFI_PROVIDER").is_none() {
        let reason = "Intel MPI would use other means of libfabric, as TCP";
        all.push(variable("I_MPI_OFI_PROVIDER", "verbs".into(), reason));
    }
    if !given.adapters && now("UCX_NET_DEVICES").is_none() {
        let devices: Vec<String> = (0..given.devices).map(|number| format!("nb{number}:1")).collect();
        let reason = "UCX would send a part of each transfer by TCP over other interfaces";
        all.push(variable("UCX_NET_DEVICES", devices.join(",").into(), reason));
    }
    all
}

/// Puts `first` in front of the previous value, but not twice in a nested run.
fn in_front(first: &Path, before: Option<OsString>) -> OsString {
    let mut all = first.as_os_str().to_owned();
    let Some(before) = before.filter(|before| !before.is_empty()) else { return all };
    for part in before.as_encoded_bytes().split(|byte| *byte == b':') {
        // SAFETY: cut at an ASCII byte out of bytes that an OsStr gave.
        let part = unsafe { OsStr::from_encoded_bytes_unchecked(part) };
        // An empty part stays: it means the current folder.
        if part != first.as_os_str() {
            all.push(":");
            all.push(part);
        }
    }
    all
}

/// One file per process: inserts `%p`, which the device replaces, before the extension unless the
/// user placed it elsewhere.
fn capture(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    if path.as_os_str().as_encoded_bytes().windows(2).any(|two| two == b"%p") {
        return path;
    }
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push("-%p");
    if let Some(ending) = path.extension() {
        name.push(".");
        name.push(ending);
    }
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIVEN: fn(usize, usize) -> Given<'static> = |gpus, engines| Given {
        dropin: Path::new("/lib/nb"),
        view: Path::new("/v"),
        report: Path::new("/r"),
        gpus,
        engines,
        devices: 1,
        cpus: 16,
        is_loopback: true,
        adapters: false,
        has_gpi: false,
    };

    fn with(args: &RunArgs, now: &[(&str, &str)]) -> Vec<Variable> {
        let given = GIVEN(1, 1);
        let find =
            |name: &str| now.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
        variables(args, &given, find)
    }

    fn value<'a>(all: &'a [Variable], name: &str) -> Option<&'a str> {
        all.iter().find(|known| known.name == name).map(|known| known.value.to_str().unwrap())
    }

    #[test]
    fn what_the_user_had_is_kept() {
        let all = with(
            &RunArgs::default(),
            &[
                ("LD_LIBRARY_PATH", "/a:/lib/nb::/b"),
                ("LD_PRELOAD", "libx.so"),
                ("NCCL_NET_GDR_LEVEL", "PHB"),
            ],
        );
        assert_eq!(value(&all, "LD_LIBRARY_PATH"), Some("/lib/nb:/a::/b"));
        assert_eq!(
            value(&all, "LD_PRELOAD"),
            Some("/lib/nb/libnobounce-vmm.so:/lib/nb/libnobounce-paths.so:/lib/nb/libibverbs.so.1:libx.so")
        );
        let without = Some("/lib/nb/libnobounce-paths.so:/lib/nb/libibverbs.so.1");
        assert_eq!(
            value(&with(&RunArgs::default(), &[("NOBOUNCE_VMM_EXPORT", "off")]), "LD_PRELOAD"),
            without
        );
        assert_eq!(value(&variables(&RunArgs::default(), &GIVEN(0, 1), |_| None), "LD_PRELOAD"), without);
        let files = RunArgs { cufile: true, ..RunArgs::default() };
        let preload = "/lib/nb/libnobounce-cufile.so:/lib/nb/libnobounce-paths.so:/lib/nb/libibverbs.so.1";
        let set = variables(&files, &GIVEN(0, 1), |_| None);
        assert_eq!(value(&set, "LD_PRELOAD"), Some(preload));
        assert_eq!(value(&set, "CUFILE_ENV_PATH_JSON"), Some("/cufile.json"));
        assert_eq!(
            (value(&set, "KVIKIO_COMPAT_MODE"), value(&all, "KVIKIO_COMPAT_MODE")),
            (Some("OFF"), None)
        );
        assert_eq!(value(&all, "NCCL_NET_GDR_LEVEL"), None);
        assert_eq!(
            value(&all, "NOBOUNCE_ADDR"),
            None,
            "nothing was typed, so the user's own variable counts"
        );
    }

    #[test]
    fn nccl_with_the_plugin_chooses_its_gin_type_itself() {
        let of = |has_gpi| {
            let given = Given { has_gpi, ..GIVEN(1, 1) };
            let all = variables(&RunArgs::default(), &given, |_| None);
            value(&all, "NCCL_GIN_TYPE").map(str::to_owned)
        };
        assert_eq!((of(false).as_deref(), of(true)), (Some("2"), None));
    }

    #[test]
    fn ucx_is_kept_to_nb0_unless_the_machine_has_adapters() {
        let given = |devices, adapters| Given { devices, adapters, ..GIVEN(0, 1) };
        let all = variables(&RunArgs::default(), &given(2, false), |_| None);
        assert_eq!(value(&all, "UCX_NET_DEVICES"), Some("nb0:1,nb1:1"));
        assert_eq!(value(&all, "UCX_TLS"), Some("rc_verbs,ud_verbs,self"));
        let on_gpus = with(&RunArgs::default(), &[]);
        assert_eq!(value(&on_gpus, "UCX_TLS"), Some("rc_verbs,ud_verbs,cuda_copy,self"));
        let all = variables(&RunArgs::default(), &given(1, true), |_| None);
        assert!(!all.iter().any(|set| set.name.starts_with("UCX_")));
        let set = with(&RunArgs::default(), &[("UCX_TLS", "all"), ("UCX_NET_DEVICES", "all")]);
        assert!(value(&set, "UCX_TLS").or(value(&set, "UCX_NET_DEVICES")).is_none());
    }

    #[test]
    fn mooncake_polls_with_one_thread_on_few_cpus() {
        let workers = |cpus| {
            let all = variables(&RunArgs::default(), &Given { cpus, ..GIVEN(0, 1) }, |_| None);
            value(&all, "MC_WORKERS_PER_CTX").map(str::to_owned)
        };
        assert_eq!((workers(2).as_deref(), workers(4)), (Some("1"), None));
    }

    #[test]
    fn intel_mpi_uses_verbs_where_libfabric_can() {
        let provider = |is_loopback, adapters| {
            let given = Given { is_loopback, adapters, ..GIVEN(0, 1) };
            let all = variables(&RunArgs::default(), &given, |_| None);
            value(&all, "I_MPI_OFI_PROVIDER").map(str::to_owned)
        };
        assert_eq!(provider(false, false).as_deref(), Some("verbs"));
        assert_eq!((provider(true, false), provider(false, true)), (None, None));
    }

    #[test]
    fn a_machine_with_one_gpu_has_one_channel_or_two_where_there_are_engines_for_them() {
        let channels = |gpus, engines| {
            let all = variables(&RunArgs::default(), &GIVEN(gpus, engines), |_| None);
            value(&all, "NCCL_MAX_NCHANNELS").map(str::to_owned)
        };
        assert_eq!([channels(1, 1), channels(1, 2), channels(1, 4)].map(Option::unwrap), ["1", "2", "2"]);
        assert_eq!(channels(8, 2), None);
        let set = with(&RunArgs::default(), &[("NCCL_MAX_NCHANNELS", "8")]);
        assert_eq!(value(&set, "NCCL_MAX_NCHANNELS"), None);
    }

    #[test]
    fn nccl_keeps_what_kernels_poll_in_gpu_memory_where_that_has_windows() {
        let asked = |now: &[(&str, &str)]| {
            value(&with(&RunArgs::default(), now), "NCCL_GDRCOPY_ENABLE").map(str::to_owned)
        };
        assert_eq!(asked(&[]).as_deref(), Some("1"));
        assert_eq!(
            (asked(&[("NOBOUNCE_WINDOW", "off")]), asked(&[("NCCL_GDRCOPY_ENABLE", "0")])),
            (None, None)
        );
        let all = variables(&RunArgs::default(), &GIVEN(0, 1), |_| None);
        assert_eq!(value(&all, "NCCL_GDRCOPY_ENABLE"), None);
    }

    #[test]
    fn copies_have_hardware_queues_where_windows_are_switched_off() {
        let queues = |gpus, set: &[(&str, &str)]| {
            let find =
                |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
            let all = variables(&RunArgs::default(), &GIVEN(gpus, 1), find);
            value(&all, "CUDA_DEVICE_MAX_CONNECTIONS").map(str::to_owned)
        };
        let off = ("NOBOUNCE_WINDOW", "off");
        assert_eq!([0, 1, 8].map(|gpus| queues(gpus, &[off])), [None, Some("32".into()), Some("32".into())]);
        assert_eq!(queues(1, &[]), None);
        assert_eq!(queues(1, &[off, ("CUDA_DEVICE_MAX_CONNECTIONS", "1")]), None);
    }

    #[test]
    fn a_run_forced_to_ll128_is_warned_about() {
        let said = |protocols: &str| warning(|name| (name == "NCCL_PROTO").then(|| protocols.into()));
        assert!(said("LL128").is_some_and(|words| words.contains("NCCL_PROTO=LL128")));
        assert!(said("simple, ll128").is_some());
        assert!(said("^LL128").is_none() && said("LL,Simple").is_none() && warning(|_| None).is_none());
        assert!(
            said("^LL128;allreduce:LL128").is_some()
                && said("allreduce:LL128").is_some()
                && said("^LL").is_some()
        );
        assert!(said("allreduce:^LL128;LL").is_none() && said("").is_none());
    }

    #[test]
    fn options_become_variables() {
        let args = RunArgs {
            addr: Some("127.0.0.9".into()),
            pcap: Some("/x/trace.pcap".into()),
            require: Some("direct".into()),
            ..RunArgs::default()
        };
        let all = with(&args, &[]);
        assert_eq!(value(&all, "NOBOUNCE_ADDR"), Some("127.0.0.9"));
        assert_eq!(value(&all, "NOBOUNCE_PCAP"), Some("/x/trace-%p.pcap"));
        assert_eq!(value(&all, "NOBOUNCE_REQUIRE"), Some("direct"));
        assert_eq!(value(&all, "NOBOUNCE_LINK"), Some("auto"), "unless told otherwise");
        let udp = RunArgs { link: Some("udp".into()), ..RunArgs::default() };
        assert_eq!(value(&with(&udp, &[]), "NOBOUNCE_LINK"), Some("udp"));
        assert_eq!(value(&with(&RunArgs::default(), &[("NOBOUNCE_LINK", "udp")]), "NOBOUNCE_LINK"), None);
        let two = RunArgs { engines: Some(2), ..RunArgs::default() };
        assert_eq!(value(&with(&two, &[]), "NOBOUNCE_ENGINES"), Some("2"));
        assert_eq!(value(&all, "NOBOUNCE_ENGINES"), None, "by the CPUs");
        assert_eq!(capture(Path::new("/x/a%p")), Path::new("/x/a%p"));
        assert_eq!(capture(Path::new("/x/plain")), Path::new("/x/plain-%p"));
    }
}
