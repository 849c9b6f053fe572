//! Combinations of versions that crash, hang or deliver wrong data change the plan of their
//! library.

#[path = "common/edit.rs"]
mod edit;

use nobounce_diagnose::verdict::{Use, UseKind};
use nobounce_diagnose::{Diagnosis, diagnose};
use nobounce_topology::machines;
use serde_json::{Value, json};

fn of(base: &str, set: &[(&str, Value)]) -> Diagnosis {
    let set: Vec<(String, Value)> =
        set.iter().map(|(path, value)| ((*path).to_owned(), value.clone())).collect();
    diagnose(&edit::edit(&machines::machine(base).unwrap(), &[], &set, base))
}

fn nccl(diagnosis: &Diagnosis) -> Use {
    diagnosis.verdicts.iter().find(|verdict| verdict.best).unwrap().nccl.clone()
}

#[test]
fn wrong_data_over_slingshot_is_no_direct_plan() {
    let old = ("/libraries/nccl/version", json!("2.27.3"));
    let mut set = vec![
        old,
        ("/nics/*/driver", json!("cxi_ss1")),
        ("/gpus/*/name", json!("NVIDIA GH200 120GB")),
        ("/kernel/modules/gdrdrv", json!({"version": "2.4"})),
    ];
    let found = of("gh200", &set);
    let plan = nccl(&found);
    assert_eq!(plan.kind, UseKind::None, "{plan:?}");
    assert!(plan.text.starts_with("fails with ") && plan.text.contains("wrong data"), "{plan:?}");
    assert!(found.direct_is_lost);
    // With the way out nothing is wrong.
    set.push(("/environment/FI_HMEM_CUDA_USE_GDRCOPY", json!("0")));
    assert_eq!(nccl(&of("gh200", &set)).kind, UseKind::Direct);
}

#[test]
fn wrong_data_over_efa_may_be() {
    let best = diagnose(&machines::machine("p5-efa").unwrap()).verdicts.into_iter().find(|v| v.best).unwrap();
    let registered = json!([{"gpu": best.gpu, "nic": best.nic, "way": "peermem", "bytes": 2_097_152,
        "probe": {"ok": true, "detail": ""}}]);
    let mut set = vec![
        ("/libraries/nccl/version", json!("2.12.12")),
        ("/kernel/peer_memory_clients", json!(["nv_mem"])),
        ("/registrations", registered),
    ];
    let plan = nccl(&of("p5-efa", &set));
    assert_eq!(plan.kind, UseKind::Unknown, "{plan:?}");
    assert!(plan.text.starts_with("may fail with ") && plan.text.contains("corrupt"), "{plan:?}");
    set.push(("/environment/NCCL_PROTO", json!("simple")));
    let found = of("p5-efa", &set);
    assert!(!found.findings.iter().any(|finding| finding.id == "known-bad"), "{:#?}", found.findings);
}

#[test]
fn a_hang_on_arm_may_be() {
    let set = |version: &str| [("/libraries/nccl/version", json!(version))];
    let plan = nccl(&of("gh200", &set("2.28.9")));
    assert!(plan.kind == UseKind::Unknown && plan.text.contains("collectives stop"), "{plan:?}");
    assert_eq!(nccl(&of("gh200", &set("2.29.3"))).kind, UseKind::Direct);
}

#[test]
fn every_row_changes_a_plan() {
    let ucx =
        |diagnosis: &Diagnosis| diagnosis.verdicts.iter().find(|verdict| verdict.best).unwrap().ucx.clone();
    let bond = [
        ("/libraries/ucx/version", json!("1.22.0")),
        ("/libraries/cuda/version", json!("12.8")),
        ("/environment/UCX_TLS", json!("rc_verbs,cuda")),
    ];
    let mut facts = machines::machine("dgx-h100").unwrap();
    facts.nics.truncate(1);
    "mlx5_bond_0".clone_into(&mut facts.nics[0].name);
    let set: Vec<(String, Value)> = bond.into_iter().map(|(path, value)| (path.to_owned(), value)).collect();
    let found = diagnose(&edit::edit(&facts, &[], &set, "bond"));
    let plan = ucx(&found);
    assert!(plan.kind == UseKind::Unknown && plan.text.starts_with("slow with mlx5_bond_0"), "{plan:?}");
    assert!(!found.direct_is_lost);
    // One that strikes in either library, one of UCX, and two of adapters.
    let found = of(
        "dgx-h100",
        &[
            ("/kernel/nvidia", json!({"version": "595.58.03", "open": true})),
            ("/libraries/nvml/version", json!("595.58.03")),
        ],
    );
    assert!(nccl(&found).text.contains("debugger") && ucx(&found).text.contains("debugger"), "{found:#?}");
    let found = of(
        "dgx-h100",
        &[
            ("/kernel/modules/gdrdrv", json!({"version": "2.4"})),
            ("/libraries/gdrapi", json!({"version": "2.4.1"})),
        ],
    );
    assert!(ucx(&found).text.contains("cannot pin") && nccl(&found).kind == UseKind::Direct, "{found:#?}");
    let found = of("hgx-h100-roce", &[("/libraries/nccl/version", json!("2.22.3"))]);
    assert!(nccl(&found).text.contains("ECE") && ucx(&found).kind == UseKind::Direct, "{found:#?}");
    let found = of(
        "hgx-h100-roce",
        &[("/nics/*/driver", json!("bnxt_re")), ("/libraries/verbs/version", json!("50.0"))],
    );
    assert!(nccl(&found).text.contains("queue pairs"), "{found:#?}");
}

#[test]
fn the_patch_level_of_gdrdrv_is_the_hosts() {
    let mut set = vec![
        ("/kernel/modules/gdrdrv", json!({"version": "2.4"})),
        ("/libraries/gdrapi", json!({"version": "2.4.1"})),
    ];
    let bad = |set: &[(&str, Value)]| {
        of("dgx-h100", set).findings.into_iter().find(|f| f.id == "known-bad" && f.title.contains("gdrdrv"))
    };
    assert_eq!(bad(&set).unwrap().evidence[0].value, "libgdrapi 2.4.1");
    // The image's library may be of another release.
    set.push(("/process/container", json!("docker")));
    assert!(bad(&set).is_none());
}
