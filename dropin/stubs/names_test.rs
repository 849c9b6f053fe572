//! Every name of names.txt, by its version, in the library as it was built; and how it ends.

use std::ffi::{CStr, CString, c_void};
use std::path::PathBuf;

/// Arguments are ignored, so that any signature works.
type Function = unsafe extern "C" fn() -> isize;

struct Library {
    handle: *mut c_void,
}

impl Library {
    fn open() -> Self {
        let name = env!("CARGO_PKG_NAME").replace("nobounce-", "lib").replace("stub-", "") + ".so";
        let test = std::env::current_exe().expect("a test has an executable");
        let path: PathBuf = test
            .ancestors()
            .skip(1)
            .take(2)
            .flat_map(|folder| [folder.join(&name), folder.join("deps").join(&name)])
            .find(|path| path.exists())
            .expect("cargo builds the library before its tests");
        let path = CString::new(path.to_str().expect("UTF-8")).expect("no NUL");
        // SAFETY: the path is a C string; the library has no constructors of its own.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        // SAFETY: dlerror is a C string after a failure.
        assert!(!handle.is_null(), "{:?}", unsafe { CStr::from_ptr(libc::dlerror()) });
        Self { handle }
    }

    fn find(&self, name: &str, version: Option<&str>) -> Option<Function> {
        let name = CString::new(name).expect("no NUL");
        let found = match version {
            Some(version) => {
                let version = CString::new(version).expect("no NUL");
                // SAFETY: the handle is open, both are C strings.
                unsafe { dlvsym(self.handle, name.as_ptr(), version.as_ptr()) }
            }
            // SAFETY: the handle is open, the name is a C string.
            None => unsafe { libc::dlsym(self.handle, name.as_ptr()) },
        };
        // SAFETY: every exported name is a function that ignores its arguments, or that the caller
        // below knows.
        (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Function>(found) })
    }
}

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const i8, version: *const i8) -> *mut c_void;
}

fn rows() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/names.txt")).lines().map(|line| {
        let mut words = line.split_whitespace();
        let mut next = || words.next().expect("VERSION ENDING NAME");
        (next(), next(), next())
    })
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

#[test]
fn every_name_has_its_version_and_fails_cleanly() {
    let library = Library::open();
    let refused = libc::EOPNOTSUPP;
    for (version, ending, name) in rows() {
        let function =
            library.find(name, Some(version)).unwrap_or_else(|| panic!("{name}@{version} is missing"));
        if ending == "own" {
            continue;
        }
        // SAFETY: the ending of a stub takes no argument.
        let returned = unsafe {
            *libc::__errno_location() = 0;
            function()
        };
        let wanted = match ending {
            "errno" => (refused as isize, refused),
            "null" => (0, refused),
            "minus" => (-1, refused),
            _ => (0, 0),
        };
        assert_eq!((returned, errno()), wanted, "{name}@{version} ({ending})");
    }
}

#[test]
fn versions_are_kept_apart() {
    let library = Library::open();
    let (version, _, name) = rows().last().expect("names");
    assert!(library.find(name, Some("NOBOUNCE_0.0")).is_none(), "{name} has an unexpected symbol version");
    assert!(library.find(name, None).is_some(), "{version} is not the default of {name}");
    assert!(
        library.find(&format!("nb.{name}.{version}"), None).is_none(),
        "trampolines must not be exported"
    );
}
