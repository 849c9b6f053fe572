//! The gRPC service `v1beta1.DevicePlugin`, which the kubelet calls.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::body::Body;
use tonic::server::{Grpc, ServerStreamingService, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tower_service::Service;

use crate::cdi::Health;
use crate::devices::{Devices, RequestError};
use crate::messages::{
    AllocateRequest, AllocateResponse, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreStartContainerRequest, PreferredAllocationRequest,
};
use crate::names::CdiDeviceName;

/// A longer request is refused before it is decoded. 10,000 device IDs take about 110 kB.
const MAX_REQUEST_BYTES: usize = 1 << 20;

/// Devices are alike and need no preparation, so the kubelet need not ask before it allocates.
pub(crate) const OPTIONS: DevicePluginOptions =
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: false };

/// What the kubelet gets for one resource. Clones share everything.
#[derive(Debug, Clone)]
pub(crate) struct DevicePlugin {
    pub(crate) devices: Devices,
    pub(crate) cdi_device: CdiDeviceName,
    pub(crate) health: watch::Receiver<Health>,
    pub(crate) watchers: Watchers,
}

/// Number of open ListAndWatch streams. The kubelet keeps one open as long as it knows the plugin.
#[derive(Debug, Clone, Default)]
pub(crate) struct Watchers(Arc<AtomicUsize>);

impl Watchers {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }

    fn enter(&self) -> Watcher {
        self.0.fetch_add(1, Ordering::Relaxed);
        Watcher(self.clone())
    }
}

#[derive(Debug)]
struct Watcher(Watchers);

impl Drop for Watcher {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl DevicePlugin {
    fn list_and_watch(&self) -> impl Stream<Item = Result<ListAndWatchResponse, Status>> + Send + use<> {
        let devices = self.devices;
        let watcher = self.watchers.enter();
        WatchStream::new(self.health.clone()).map(move |health| {
            // Owned by the stream, so that it is counted until it is dropped.
            let _watcher = &watcher;
            Ok(ListAndWatchResponse { devices: devices.list(health.word()) })
        })
    }

    fn allocate(&self, request: &AllocateRequest) -> Result<AllocateResponse, Status> {
        if let Health::Unhealthy(reason) = &*self.health.borrow() {
            return Err(Status::failed_precondition(reason.clone()));
        }
        Ok(self.devices.allocate(request, &self.cdi_device.to_string())?)
    }
}

impl From<RequestError> for Status {
    fn from(error: RequestError) -> Self {
        Self::invalid_argument(error.to_string())
    }
}

/// A method as a function from request to response; none of them waits.
struct Method<F>(F);

impl<F, Q, R> UnaryService<Q> for Method<F>
where
    F: FnMut(Q) -> Result<R, Status>,
{
    type Response = R;
    type Future = Ready<Result<Response<R>, Status>>;

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        ready(self.0(request.into_inner()).map(Response::new))
    }
}

/// A method with a stream of responses.
struct StreamMethod<F>(F);

impl<F, Q, S, R> ServerStreamingService<Q> for StreamMethod<F>
where
    F: FnMut(Q) -> S,
    S: Stream<Item = Result<R, Status>>,
{
    type Response = R;
    type ResponseStream = S;
    type Future = Ready<Result<Response<S>, Status>>;

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        ready(Ok(Response::new(self.0(request.into_inner()))))
    }
}

async fn unary<Q, R, F>(request: http::Request<Body>, method: F) -> http::Response<Body>
where
    Q: prost::Message + Default + Send + Sync + 'static,
    R: prost::Message + Default + Send + Sync + 'static,
    F: FnMut(Q) -> Result<R, Status>,
{
    grpc::<R, Q>().unary(Method(method), request).await
}

fn grpc<R, Q>() -> Grpc<ProstCodec<R, Q>>
where
    Q: prost::Message + Default + Send + Sync + 'static,
    R: prost::Message + Default + Send + Sync + 'static,
{
    Grpc::new(ProstCodec::default()).max_decoding_message_size(MAX_REQUEST_BYTES)
}

impl Service<http::Request<Body>> for DevicePlugin {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let plugin = self.clone();
        Box::pin(async move {
            Ok(match request.uri().path() {
                "/v1beta1.DevicePlugin/GetDevicePluginOptions" => {
                    unary(request, |_: Empty| Ok(OPTIONS)).await
                }
                "/v1beta1.DevicePlugin/ListAndWatch" => {
                    let method = StreamMethod(|_: Empty| plugin.list_and_watch());
                    grpc().server_streaming(method, request).await
                }
                "/v1beta1.DevicePlugin/Allocate" => {
                    unary(request, |allocation| plugin.allocate(&allocation)).await
                }
                "/v1beta1.DevicePlugin/GetPreferredAllocation" => {
                    let prefer = |wanted: PreferredAllocationRequest| Ok(plugin.devices.prefer(&wanted)?);
                    unary(request, prefer).await
                }
                "/v1beta1.DevicePlugin/PreStartContainer" => {
                    let check = |container: PreStartContainerRequest| {
                        plugin.devices.check_started(&container.devices_ids)?;
                        Ok(Empty {})
                    };
                    unary(request, check).await
                }
                path => Status::unimplemented(format!("{path:?} is not a method of v1beta1.DevicePlugin"))
                    .into_http(),
            })
        })
    }
}
