//! One name for each device, and one figure for the cost, in all texts.

use crate::finding::{Effect, Finding};
use crate::verdict::{UseKind, Verdict, concerns_names};
use nobounce_topology::facts::Facts;

/// GPUs are named by their number in titles and reasons, as in the table; evidence and commands
/// keep the address. Findings that cost bandwidth get the predictor's figure.
pub(crate) fn name_devices(facts: &Facts, findings: &mut [Finding], verdicts: &mut [Verdict]) {
    let names: Vec<(&str, String)> = facts
        .gpus
        .iter()
        .filter(|gpu| gpu.index.is_some())
        .map(|gpu| (gpu.address.as_str(), gpu.label()))
        .collect();
    let named = |text: &mut String| {
        for (address, label) in &names {
            if text.contains(address) {
                *text = text.replace(&format!("GPU {address}"), label).replace(address, label);
            }
        }
    };
    for finding in &mut *findings {
        named(&mut finding.title);
        named(&mut finding.why);
        finding.cost = cost(facts, finding, verdicts);
    }
    for verdict in verdicts {
        verdict.reasons.iter_mut().for_each(&named);
        named(&mut verdict.nccl.text);
        named(&mut verdict.ucx.text);
    }
}

/// What the worst of its pairs loses.
fn cost(facts: &Facts, finding: &Finding, verdicts: &[Verdict]) -> Option<String> {
    if !matches!(finding.effect, Effect::Slows | Effect::Blocks) || finding.library.is_some() {
        return None;
    }
    let worst = verdicts
        .iter()
        .filter(|verdict| verdict.best && concerns_names(finding, &verdict.gpu, &verdict.nic))
        // Where no library uses the adapter, its staged rate is not what programs get.
        .filter(|verdict| [&verdict.nccl, &verdict.ucx].iter().any(|plan| plan.kind != UseKind::None))
        .filter(|verdict| verdict.loss().is_some())
        .min_by(|a, b| b.loss().partial_cmp(&a.loss()).unwrap_or(std::cmp::Ordering::Equal))?;
    let gpu = facts.gpus.iter().find(|gpu| gpu.address == worst.gpu)?.label();
    let (now, could) = (worst.expected_gbs?, worst.possible_gbs?);
    Some(format!("{gpu} with {}: {now:.1} of {could:.1} GB/s expected", worst.nic))
}
