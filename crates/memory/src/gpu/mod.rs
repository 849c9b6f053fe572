//! GPU memory: lookup, allocation, registration, and CPU access through BAR1.
//!
//! * [`Driver`]: the CUDA driver, loaded at run time; all calls go through it and keep its rules
//!   (`call.rs`).
//! * [`Gpu`]: a device. [`GpuRange`]: what a pointer is. [`GpuBuffer`]: our own memory, allocated
//!   for RDMA.
//! * [`GpuMemory`]: one registration, with its [`GpuWindow`] if it could be mapped, its paths, and
//!   the reasons otherwise.
//! * [`CopyEngine`](copy_engine::CopyEngine): copies by the GPU. [`calibration`]: from which length
//!   on they beat loads.

pub mod allocation;
pub mod api;
pub mod calibration;
mod call;
mod context;
pub mod copy_engine;
pub mod device;
pub mod dmabuf;
pub mod driver;
mod ending;
pub mod error;
pub mod gpu_window;
pub mod kernel;
pub mod naive;
mod nodes;
mod own_stream;
pub mod range;
mod range_error;
pub mod region;
mod rm;
mod shadow;
pub mod stream_event;
mod watch;
pub mod window;

pub use allocation::GpuBuffer;
pub use device::Gpu;
pub use driver::Driver;
pub use error::{CudaError, DriverError};
pub use gpu_window::GpuWindow;
pub use range::{GPU_PAGE, GpuRange, GpuRangeError, MemoryKind};
pub use region::{Gone, GpuMemory, GpuOptions, GpuRegisterError};
pub use shadow::Shadowed;
pub use stream_event::{StreamError, StreamEvent};
pub use window::{Method, WindowRefusal};
