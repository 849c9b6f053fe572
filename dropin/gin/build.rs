//! Sets the library's soname, and `-z nodelete`: NCCL unloads plugins, and this one has threads, a
//! signal handler and a fork handler.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl-gin.so");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // The unwinder is linked in.
    println!("cargo::rustc-link-search=native={}/../link", env!("CARGO_MANIFEST_DIR"));
}
