//! Registration at the kubelet: one call on `kubelet.sock`.

use std::path::Path;
use std::time::Duration;

use http::uri::PathAndQuery;
use tonic::client::Grpc;
use tonic::transport::Endpoint;
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

use crate::messages::{Empty, RegisterRequest};

/// The kubelet's socket in the plugin directory.
pub(crate) const SOCKET_NAME: &str = "kubelet.sock";

/// Longer than the 10 s that the kubelet waits for the plugin's socket before it answers.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum RegisterError {
    #[error(
        "{SOCKET_NAME} exists, but takes no connection ({0}); start the kubelet (systemctl status kubelet)"
    )]
    Connect(String),
    #[error(
        "the kubelet did not answer the registration in {} s; look into its log (journalctl -u kubelet)",
        REGISTER_TIMEOUT.as_secs()
    )]
    Timeout,
    #[error(
        "the kubelet refused the registration: {} ({}); its log has more (journalctl -u kubelet)",
        .0.message().trim(),
        .0.code()
    )]
    Refused(Status),
}

/// Registers a resource. The kubelet connects to the plugin's socket before it answers.
pub(crate) async fn register(socket: &Path, request: RegisterRequest) -> Result<(), RegisterError> {
    let call = async {
        let endpoint =
            Endpoint::from_shared(format!("unix://{}", socket.display())).map_err(connect_error)?;
        let mut client = Grpc::new(endpoint.connect().await.map_err(connect_error)?);
        client.ready().await.map_err(connect_error)?;
        let path = PathAndQuery::from_static("/v1beta1.Registration/Register");
        let codec = ProstCodec::<RegisterRequest, Empty>::default();
        client.unary(Request::new(request), path, codec).await.map_err(RegisterError::Refused)?;
        Ok(())
    };
    tokio::time::timeout(REGISTER_TIMEOUT, call).await.unwrap_or(Err(RegisterError::Timeout))
}

/// The innermost cause: "Connection refused" says more than "transport error".
fn connect_error(error: tonic::transport::Error) -> RegisterError {
    let mut cause: &dyn std::error::Error = &error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    RegisterError::Connect(cause.to_string())
}
