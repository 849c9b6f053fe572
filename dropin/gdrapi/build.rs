//! Gives the library its name, and keeps it in memory once it is there: a signal handler and a fork handler lie in it.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libgdrapi.so.2");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
