//! Sets the library's soname, its symbol versions, and `-z nodelete` (threads run in it).

#[path = "../link/lld.rs"]
mod lld;

fn main() {
    lld::link_with_lld();
    let nodes =
        std::path::Path::new(&std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default()).join("nodes.map");
    println!("cargo::rerun-if-changed={}", nodes.display());
    println!("cargo::rustc-cdylib-link-arg=-Wl,--version-script={}", nodes.display());
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libibverbs.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // The unwinder is linked in.
    println!("cargo::rustc-link-search=native={}/../link", env!("CARGO_MANIFEST_DIR"));
}
