//! Links the unwinder into the library.

fn main() {
    println!("cargo::rustc-link-search=native={}/../link", env!("CARGO_MANIFEST_DIR"));
}
