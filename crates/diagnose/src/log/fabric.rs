//! What libfabric logs (`FI_LOG_LEVEL=warn` or more), and NCCL's plugin for it (NET/OFI).

use std::collections::BTreeMap;

use super::{Adapters, KnownMessages, Seen, fatal};

/// A text in a line, and what it means.
const PROBLEMS: [(&str, &str); 9] = [
    ("disabling GDR", "the plugin switched GPUDirect off: the provider cannot keep from calling CUDA"),
    ("No eligible providers were found", "libfabric found no provider for the adapters: TCP is used"),
    ("no providers found", "libfabric found no provider for the adapters: TCP is used"),
    ("Unable to retrieve dmabuf fd", "the GPU's memory was not exported as a dma-buf; ibv_reg_mr is tried"),
    ("Unable to register CUDA device buffer", "the adapter refused GPU memory"),
    ("Unable to register MR", "the adapter refused memory"),
    ("FI_HMEM", "the program requires GPU memory of the provider (FI_HMEM)"),
    ("emulat", "the provider emulates the operation in software: the CPU copies, no RDMA"),
    ("prov error", "the provider reported an error of a request"),
];

/// What a log says.
#[derive(Clone, Debug, Default)]
pub struct FabricLog {
    /// Lines of libfabric's or of its plugin's.
    pub lines: u64,
    /// Providers that were selected, with how often.
    pub providers: BTreeMap<String, u64>,
    /// Warnings that matter, by what they mean.
    pub problems: BTreeMap<&'static str, Seen>,
    /// Messages whose causes are known.
    pub known: KnownMessages,
    /// Errors by adapter.
    pub errors: Adapters,
    /// Fatal completions by their status.
    pub(super) fatal: BTreeMap<u32, (fatal::Status, Seen)>,
}

impl FabricLog {
    pub(super) fn take(&mut self, line: &str) {
        let own = line.starts_with("libfabric:") || line.contains(" libfabric:");
        if !own && !line.contains("NET/OFI") {
            return;
        }
        self.lines += 1;
        // NCCL's own log has those of its plugin.
        if !line.contains("NCCL ") {
            self.known.take(line);
        }
        // `Selected Provider is efa (found 4 nics)`, `Selected provider is efa, fabric is efa`.
        if let Some(at) = line.to_ascii_lowercase().find("selected provider is ") {
            let name: String = line[at + 21..]
                .chars()
                .take_while(|c| c.is_ascii_alphanumeric() || "_;".contains(*c))
                .collect();
            if self.providers.len() < 64 {
                *self.providers.entry(name).or_default() += 1;
            }
        }
        if let Some((_, meaning)) = PROBLEMS.iter().find(|(text, _)| line.contains(text)) {
            self.problems.entry(meaning).or_default().take(line);
        }
        let status = fatal::status(line);
        self.errors.take("", status.map(|status| status.number), line);
        if let Some(status) = status {
            self.fatal.entry(status.number).or_insert_with(|| (status, Seen::default())).1.take(line);
        }
    }
}
