//! Fixes of a container name the side that they belong to.

#[expect(dead_code, reason = "what cases give is another test's")]
#[path = "common/cases.rs"]
mod cases;

use nobounce_diagnose::diagnose;
use nobounce_diagnose::finding::Finding;
use nobounce_topology::facts::{Facts, Read};
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

/// What the image, its start or its namespaces mend.
fn is_of_the_container(finding: &Finding) -> bool {
    const IDS: [&str; 14] = [
        "no-libibverbs",
        "verbs-provider",
        "verbs-too-old",
        "wheel-",
        "ucx-",
        "nccl-",
        "nic-other-namespace",
        "security-denied",
        "memlock",
        "gid-",
        "rails-",
        "mtu-",
        "ats-off",
        "known-bad",
    ];
    IDS.iter().any(|begin| finding.id.starts_with(begin))
}

#[test]
fn fixes_in_a_container_name_the_side() {
    let (mut named, mut wrong) = (0, Vec::new());
    for (name, facts) in containers() {
        for finding in diagnose(&facts).findings {
            let is_of_host = (finding.needs_root || finding.needs_reboot) && !is_of_the_container(&finding);
            // A chain's first finding also has the fixes of the others.
            let is_chain = finding.fix.iter().any(|fix| fix.starts_with("By "));
            for fix in finding.fix.iter().filter(|fix| !fix.contains("start the container")) {
                let told = fix.to_lowercase().contains("on the host, not in the container");
                named += u32::from(told);
                if told != is_of_host && !is_chain {
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
fn outside_of_a_container_there_is_one_side() {
    for name in machines::NAMES {
        let mut facts = machines::machine(name).unwrap();
        facts.process.container = Read::Yes(None);
        for finding in diagnose(&facts).findings {
            assert!(!finding.fix.iter().any(|fix| fix.contains("not in the container")), "{finding:?}");
        }
    }
}
