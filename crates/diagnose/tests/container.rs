//! Fixes of a container name the side that they belong to.

#[expect(dead_code, reason = "what cases give is another test's")]
#[path = "common/cases.rs"]
mod cases;

use nobounce_diagnose::diagnose;
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

#[test]
fn fixes_in_a_container_name_the_side() {
    let (mut named, mut wrong) = (0, Vec::new());
    for (name, facts) in containers() {
        for finding in diagnose(&facts).findings {
            // A chain's first finding also has the fixes of the others.
            let is_chain = finding.fix.iter().any(|fix| fix.starts_with("By "));
            for fix in finding.fix.iter().filter(|fix| !fix.contains("start the container")) {
                let is_told = fix.to_lowercase().contains("on the host");
                named += u32::from(is_told);
                let needs = |words: &[&str]| words.iter().any(|word| fix.contains(word));
                let is_of_host = finding.needs_reboot || needs(&OF_THE_HOST);
                let is_of_image = !finding.needs_reboot && needs(&OF_THE_IMAGE);
                if !is_chain && (is_of_host && !is_told || is_of_image && is_told) {
                    wrong.push(format!("{name}: {}: {fix}", finding.id));
                }
                assert!(!fix.contains("container: on the host"), "{fix}");
            }
        }
    }
    wrong.sort();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(named > 150, "{named} fixes name the host");
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
        let is_told =
            |fix: &String| fix.starts_with("on the host, not in the container") && fix.contains(word);
        assert!(finding.fix.iter().any(is_told), "{finding:#?}");
    }
}

#[test]
fn outside_of_a_container_there_is_one_side() {
    for name in machines::NAMES {
        let mut facts = machines::machine(name).unwrap();
        facts.process.container = Read::Yes(None);
        for finding in diagnose(&facts).findings {
            assert!(!finding.fix.iter().any(|fix| fix.contains("not in the container")), "{finding:?}");
        }
    }
}
