//! Fixes of a container name the side that they belong to.

#[expect(dead_code, reason = "what cases give is another test's")]
#[path = "common/cases.rs"]
mod cases;

use nobounce_diagnose::diagnose;
use nobounce_diagnose::finding::{Fix, FixPart, Side};
use nobounce_topology::facts::{Facts, Probe, Read};
use nobounce_topology::machines;

use cases::{all, apply};

/// Every known machine and recorded case, seen from a container.
fn containers() -> impl Iterator<Item = (String, Facts)> {
    let known = machines::NAMES.iter().map(|name| ((*name).to_owned(), machines::machine(name).unwrap()));
    let recorded =
        all().into_iter().map(|(_, case)| (format!("{} ({})", case.thread, case.says), apply(&case)));
    known.chain(recorded).map(|(name, mut facts)| {
        facts.process.container = Read::Yes(Some("docker".to_owned()));
        (name, facts)
    })
}

/// Words of fixes that change what all containers of a host share.
const OF_THE_HOST: [&str; 14] = [
    "modprobe",
    "rmmod",
    "modules-load.d",
    "dkms",
    "grubby",
    "update-grub",
    "setpci",
    "mlxconfig",
    "setsebool",
    "outer user",
    "upgrade the driver to 59",
    "nv_peer_mem 1.2",
    "gdrdrv to 2.4",
    "kernel command line",
];

/// Words of fixes that the image or its start makes.
const OF_THE_IMAGE: [&str; 6] =
    ["ibverbs-providers", "libibverbs1", "rdma-core 34", "pip install", "LD_LIBRARY_PATH", "--ulimit"];

const TOLD: &str = "on the host, not in the container";

#[test]
fn fixes_in_a_container_name_the_side() {
    let (mut named, mut wrong) = (0, Vec::new());
    for (name, facts) in containers() {
        for finding in diagnose(&facts).findings {
            for fix in &finding.fix {
                let text = fix.to_string();
                let is_told = text.contains(TOLD);
                // A guest has a host of its own.
                let is_guest = text.contains("virtual machine's host");
                named += u32::from(is_told);
                assert_eq!(is_told, fix.side() == Side::Host, "{}: {text}", finding.id);
                assert!(text.matches(TOLD).count() <= 1, "{text}");
                let needs = |words: &[&str]| words.iter().any(|word| text.contains(word));
                // Variables and options are those of the container, also beside a fix of the host.
                let of_container =
                    |part: &FixPart| matches!(part, FixPart::Assignment(_) | FixPart::EngineOption(_));
                let is_of_container = fix.parts().iter().any(of_container) || needs(&OF_THE_IMAGE);
                if is_of_container && is_told || needs(&OF_THE_HOST) && !is_told && !is_guest {
                    wrong.push(format!("{name}: {}: {text}", finding.id));
                }
            }
        }
    }
    wrong.sort();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(named > 150, "{named} fixes name the host");
}

#[test]
fn fixes_of_one_finding_have_their_own_sides() {
    let mut facts = machines::machine("dgx-h100").unwrap();
    facts.process.container = Read::Yes(Some("docker".to_owned()));
    facts.kernel.log =
        Read::Yes(vec!["avc:  denied  { read } path=\"/dev/infiniband/uverbs0\" tclass=chr_file".to_owned()]);
    let findings = diagnose(&facts).findings;
    let denied = findings.iter().find(|finding| finding.id == "security-denied").unwrap();
    let sides: Vec<Side> = denied.fix.iter().map(Fix::side).collect();
    assert_eq!(sides, [Side::Container, Side::Host]);
    let told: Vec<bool> = denied.fix.iter().map(|fix| fix.to_string().contains(TOLD)).collect();
    assert_eq!(told, [false, true], "{denied:#?}");
}

#[test]
fn limits_and_policies_of_the_host_are_named() {
    let mut facts = machines::machine("dgx-h100").unwrap();
    facts.process.container = Read::Yes(Some("podman".to_owned()));
    facts.process.user_namespace = Read::Yes(true);
    facts.process.mlock_probe = Read::Yes(Probe::failed(Some(12), "Cannot allocate memory"));
    facts.kernel.log =
        Read::Yes(vec!["avc:  denied  { read } path=\"/dev/infiniband/uverbs0\" tclass=chr_file".to_owned()]);
    let findings = diagnose(&facts).findings;
    for (id, word) in [("memlock-userns", "outer user"), ("security-denied", "setsebool")] {
        let finding = findings.iter().find(|finding| finding.id == id).unwrap();
        let texts = || finding.fix.iter().map(ToString::to_string);
        assert!(texts().any(|fix| fix.contains(TOLD) && fix.contains(word)), "{finding:#?}");
    }
}

#[test]
fn outside_of_a_container_there_is_one_side() {
    for name in machines::NAMES {
        let mut facts = machines::machine(name).unwrap();
        facts.process.container = Read::Yes(None);
        for finding in diagnose(&facts).findings {
            assert!(
                !finding.fix.iter().any(|fix| fix.to_string().contains("not in the container")),
                "{finding:?}"
            );
        }
    }
}
