//! Recorded cases and the corpus hold only facts that the collector can produce, and facts that can
//! be true together.

#[expect(dead_code, reason = "what cases give is another test's")]
#[path = "common/cases.rs"]
mod cases;
#[expect(dead_code, reason = "scores are another test's")]
#[path = "common/corpus.rs"]
mod corpus;
#[path = "common/plant.rs"]
mod plant;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use nobounce_topology::facts::{Facts, Read};
use nobounce_topology::sysfs::{self, Root, Surroundings};

/// Facts by the name of their case.
fn all() -> Vec<(String, Facts)> {
    let recorded = cases::all().into_iter().map(|(file, case)| {
        let facts = cases::apply(&case);
        (format!("{file} {} ({})", case.thread, case.says), facts)
    });
    let corpus = ["threads", "unseen"].into_iter().flat_map(corpus::cases);
    recorded.chain(corpus.map(|case| (case.name.clone(), case.facts()))).collect()
}

#[test]
fn settings_are_those_that_are_collected() {
    let mut wrong = Vec::new();
    for (name, facts) in all() {
        let files = facts.config_files.values().flat_map(|settings| settings.keys());
        wrong.extend(
            facts
                .environment
                .keys()
                .chain(files)
                .filter(|variable| !sysfs::matters(variable))
                .map(|v| format!("{name}: {v}")),
        );
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A folder that goes when the test does.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn facts_of_the_kernel_come_back_from_files() {
    let folder = Folder(std::env::temp_dir().join(format!("nobounce-faithful-{}", std::process::id())));
    let mut wrong = Vec::new();
    let mut planted = BTreeSet::new();
    for (name, facts) in all() {
        if !planted.insert(serde_json::to_string(&facts.kernel).unwrap()) {
            continue;
        }
        let _ = fs::remove_dir_all(&folder.0);
        fs::create_dir_all(folder.0.join("sys/bus/pci/devices")).unwrap();
        let kernel = Facts { kernel: facts.kernel.clone(), ..Facts::default() };
        plant::plant(&kernel, &folder.0).unwrap();
        let found = sysfs::read(&Root::new(&folder.0), &Surroundings::default()).unwrap().kernel;
        let lost = |what: &str, known: &[String], found: &[String]| {
            let lost: Vec<&String> = known.iter().filter(|item| !found.contains(item)).collect();
            (!lost.is_empty()).then(|| format!("{name}: {what} {lost:?}"))
        };
        let keys =
            |read: Option<Vec<&String>>| -> Vec<String> { read.into_iter().flatten().cloned().collect() };
        wrong.extend(lost(
            "modules",
            &keys(facts.kernel.modules.known().map(|map| map.keys().collect())),
            &keys(found.modules.known().map(|map| map.keys().collect())),
        ));
        wrong.extend(lost(
            "options",
            &keys(facts.kernel.options.known().map(|map| map.keys().collect())),
            &keys(found.options.known().map(|map| map.keys().collect())),
        ));
        let list = |read: &Read<Vec<String>>| read.known().cloned().unwrap_or_default();
        wrong.extend(lost("installed", &list(&facts.kernel.installed), &list(&found.installed)));
        wrong.extend(lost("at_boot", &list(&facts.kernel.at_boot), &list(&found.at_boot)));
    }
    assert!(wrong.is_empty(), "{} facts: {wrong:#?}", wrong.len());
}

#[test]
fn facts_can_be_true_together() {
    let mut wrong = Vec::new();
    for (name, facts) in all() {
        wrong.extend(contradictions(&facts).into_iter().map(|what| format!("{name}: {what}")));
    }
    assert!(wrong.is_empty(), "{} contradictions: {wrong:#?}", wrong.len());
}

/// Facts that exclude each other, by the order in which the collector finds them out.
fn contradictions(facts: &Facts) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut rule = |broken: bool, what: String| wrong.extend(broken.then_some(what));
    for gpu in &facts.gpus {
        let exported = gpu.export_probe.known().map(|probe| probe.ok);
        rule(
            gpu.dma_buf.get() == Some(false) && exported == Some(true),
            format!("{} cannot export dma-bufs, and one was exported", gpu.address),
        );
        // One attribute may be unknown to an old driver; without CUDA there is none.
        let errored = gpu.gpudirect_rdma.why_not().is_some_and(|why| why.contains("cuInit"));
        rule(
            errored && exported.is_some(),
            format!("CUDA failed on {}, and memory was exported", gpu.address),
        );
    }
    for nic in &facts.nics {
        let opened = nic.open_probe.known().map(|probe| probe.ok);
        let tried = nic.dma_buf_probe.known().is_some();
        rule(
            opened == Some(false) && tried,
            format!("{} was not opened, and memory was registered", nic.name),
        );
        let none = matches!(facts.libraries.verbs.known(), Some(None));
        rule(none && (opened.is_some() || tried), format!("{} was opened without libibverbs", nic.name));
    }
    for registration in &facts.registrations {
        rule(
            !facts.gpus.iter().any(|gpu| gpu.address == registration.gpu)
                || !facts.nics.iter().any(|nic| nic.name == registration.nic),
            format!("{} or {} does not exist", registration.gpu, registration.nic),
        );
    }
    let loaded = |module: &str| facts.kernel.is_loaded(module) != Some(false);
    let shows = facts.kernel.shows_nvidia_client() == Some(true);
    rule(
        shows && !loaded("nvidia_peermem") && !loaded("nv_peer_mem"),
        "a client of peer memory without its module".to_owned(),
    );
    let clients = facts.kernel.peer_memory_clients.known().is_some_and(|clients| !clients.is_empty());
    rule(
        clients && facts.kernel.peer_memory_api.get() == Some(false),
        "a client of peer memory without the interface".to_owned(),
    );
    wrong
}
