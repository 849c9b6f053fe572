//! Kernels: there is no GPU to run them.

use crate::call::{Rule, call};
use crate::status::Status;

macro_rules! refused {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name($(_: $type),*) -> Status {
            call(stringify!($name), Rule::Context, |_| Err(Status::NOT_SUPPORTED))
        }
    )*};
}

refused! {
    cuModuleLoadData(module: usize, image: usize);
    cuModuleUnload(module: usize);
    cuModuleGetFunction(function: usize, module: usize, name: usize);
    cuLaunchKernel(function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: usize, arguments: usize, extra: usize);
}
