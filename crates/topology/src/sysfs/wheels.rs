//! Libraries of verbs and UCX in packages of Python, and the system's providers, by the names of
//! files.

use super::Root;
use super::settings::{LIBRARY_FOLDERS, modules};
use crate::facts::{Provider, Read, Wheel, WheelVerbs};

/// Folders of packages that are looked into.
const MAX_FOLDERS: usize = 1024;
/// Packages that are kept.
const MAX_WHEELS: usize = 64;
/// Providers of rdma-core for adapters.
const PROVIDERS: [&str; 13] = [
    "bnxt_re",
    "cxgb4",
    "efa",
    "erdma",
    "hfi1verbs",
    "hns",
    "ionic",
    "irdma",
    "mana",
    "mlx4",
    "mlx5",
    "qedr",
    "vmw_pvrdma",
];

/// The name of a library without `lib`, the hash of auditwheel and versions: `mlx5` of
/// `libmlx5-6c1b9c1e.so.1.25.50.0` and of `libmlx5-rdmav34.so`.
fn stem(name: &str) -> Option<&str> {
    let name = name.strip_prefix("lib")?.split_once(".so")?.0;
    Some(name.split('-').next().unwrap_or(name))
}

/// The private version in the symbols of a libibverbs: `IBVERBS_PRIVATE_34`.
fn private_version(bytes: &[u8]) -> Option<u32> {
    const NAME: &[u8] = b"IBVERBS_PRIVATE_";
    let at = bytes.windows(NAME.len()).position(|part| part == NAME)?;
    let digits = bytes[at + NAME.len()..].iter().take(6).take_while(|byte| byte.is_ascii_digit());
    digits.fold(None, |number, byte| Some(number.unwrap_or(0) * 10 + u32::from(byte - b'0')))
}

/// Providers of the system's libibverbs.
pub(super) fn providers(root: &Root) -> Read<Vec<Provider>> {
    let of = |name: &String| {
        let (name, abi) = name.strip_prefix("lib")?.strip_suffix(".so")?.split_once("-rdmav")?;
        Some(Provider { name: name.to_owned(), abi: abi.parse().ok()? })
    };
    let mut found: Vec<Provider> = LIBRARY_FOLDERS
        .iter()
        .flat_map(|folder| root.names(&format!("{folder}/libibverbs")).unwrap_or_default())
        .filter_map(|name| of(&name))
        .collect();
    found.sort();
    found.dedup();
    Read::Yes(found)
}

/// Packages with libraries of their own, in these folders of packages.
pub(super) fn wheels(root: &Root, folders: &[String]) -> Read<Vec<Wheel>> {
    let mut found = Vec::new();
    for folder in folders {
        let names = root.names(folder).unwrap_or_default();
        let infos: Vec<&String> = names.iter().filter(|name| name.ends_with(".dist-info")).collect();
        for name in names.iter().filter(|name| !name.ends_with("-info")).take(MAX_FOLDERS) {
            // `nixl_cu12.libs` of auditwheel, `.nixl_cu12.mesonpy.libs` of meson-python,
            // `libucx/lib`.
            let package = name.trim_start_matches('.').trim_end_matches(".libs").trim_end_matches(".mesonpy");
            let place = match name.ends_with(".libs") {
                true => format!("{folder}/{name}"),
                false => format!("{folder}/{name}/lib"),
            };
            found.extend(wheel(root, &place, package, &infos));
        }
    }
    found.truncate(MAX_WHEELS);
    Read::Yes(found)
}

/// The libraries of a package in one folder, if any of them matters.
fn wheel(root: &Root, place: &str, package: &str, infos: &[&String]) -> Option<Wheel> {
    let names = root.names(place).ok()?;
    let is = |wanted: &str| names.iter().find(|name| stem(name) == Some(wanted));
    let verbs = is("ibverbs").map(|name| {
        let file = format!("{place}/{name}");
        let abi = root.bytes(&file).ok().and_then(|bytes| private_version(&bytes));
        WheelVerbs { file, abi }
    });
    let ucx = is("ucp").map(|_| modules(root, &format!("{place}/ucx")));
    if verbs.is_none() && ucx.is_none() {
        return None;
    }
    let providers: Vec<String> =
        PROVIDERS.iter().filter(|name| is(name).is_some()).map(|name| (*name).to_owned()).collect();
    let named = |info: &&&String| info.starts_with(&format!("{package}-"));
    // `libucx_cu12-1.18.0.dist-info` has the folder `libucx`.
    let longer = |info: &&&String| info.starts_with(&format!("{package}_"));
    let info = infos.iter().find(named).or_else(|| infos.iter().find(longer));
    let (name, version) = info
        .and_then(|info| info.strip_suffix(".dist-info")?.split_once('-'))
        .map_or((package, None), |(name, version)| (name, Some(version.to_owned())));
    Some(Wheel { name: name.to_owned(), version, verbs, providers, ucx })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lose_hashes_and_versions() {
        assert_eq!(stem("libmlx5-6c1b9c1e.so.1.25.50.0"), Some("mlx5"));
        assert_eq!(
            (stem("libbnxt_re-rdmav34.so"), stem("libibverbs.so.1")),
            (Some("bnxt_re"), Some("ibverbs"))
        );
        assert_eq!((stem("mlx5.so"), stem("libmlx5.a")), (None, None));
    }

    #[test]
    fn the_private_version_is_a_number_behind_its_name() {
        assert_eq!(private_version(b"\0IBVERBS_1.1\0IBVERBS_PRIVATE_34\0"), Some(34));
        assert_eq!((private_version(b"IBVERBS_PRIVATE_"), private_version(b"IBVERBS_1.14")), (None, None));
        assert_eq!(private_version(b"IBVERBS_PRIVATE_99999999999999"), Some(999_999));
    }

    #[test]
    fn packages_tell_what_they_bring() {
        let folder = std::env::temp_dir().join(format!("nobounce-wheels-{}", std::process::id()));
        let put = |path: &str, text: &str| {
            let path = folder.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        for (path, text) in [
            ("p/nixl_cu12-0.7.1.dist-info/METADATA", ""),
            ("p/.nixl_cu12.mesonpy.libs/libibverbs-1a2b.so.1.14.50.0", "x IBVERBS_PRIVATE_34 y"),
            ("p/.nixl_cu12.mesonpy.libs/libefa-3c4d.so.1", ""),
            ("p/libucx_cu12-1.18.0.dist-info/METADATA", ""),
            ("p/libucx/lib/libucp.so.0", ""),
            ("p/libucx/lib/ucx/libuct_cuda.so.0", ""),
            ("p/libucx/lib/ucx/libuct_ib-5e6f.so.0", ""),
            ("p/numpy.libs/libopenblas.so", ""),
            ("usr/lib64/libibverbs/libmlx5-rdmav57.so", ""),
        ] {
            put(path, text);
        }
        let root = Root::new(&folder);
        let found = wheels(&root, &["/p".to_owned()]);
        let found = found.known().unwrap();
        assert_eq!(found.len(), 2, "{found:#?}");
        assert_eq!((found[0].name.as_str(), found[0].version.as_deref()), ("nixl_cu12", Some("0.7.1")));
        let verbs = found[0].verbs.as_ref().unwrap();
        assert_eq!((verbs.abi, found[0].providers.as_slice()), (Some(34), &["efa".to_owned()][..]));
        assert!(verbs.file.ends_with("/libibverbs-1a2b.so.1.14.50.0") && found[0].ucx.is_none());
        assert_eq!((found[1].name.as_str(), found[1].version.as_deref()), ("libucx_cu12", Some("1.18.0")));
        assert_eq!(found[1].ucx.as_deref(), Some(&["cuda".to_owned(), "ib".to_owned()][..]));
        let system = providers(&root);
        assert_eq!(system.known().unwrap(), &[Provider { name: "mlx5".to_owned(), abi: 57 }]);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
