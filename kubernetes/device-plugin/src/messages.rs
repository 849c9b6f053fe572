//! The messages of `proto/deviceplugin.proto`, for prost.
//!
//! Written by hand, so that building needs no `protoc`. Fields that the plugin never fills (`envs`,
//! `mounts`, `devices`, `annotations`, `topology`) are left out: proto3 omits empty fields anyway.

use prost::Message;

/// Version of the device plugin API.
pub(crate) const API_VERSION: &str = "v1beta1";

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Empty {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RegisterRequest {
    #[prost(string, tag = "1")]
    pub(crate) version: String,
    /// File name of the socket, in the directory of `kubelet.sock`.
    #[prost(string, tag = "2")]
    pub(crate) endpoint: String,
    #[prost(string, tag = "3")]
    pub(crate) resource_name: String,
    #[prost(message, optional, tag = "4")]
    pub(crate) options: Option<DevicePluginOptions>,
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(crate) struct DevicePluginOptions {
    #[prost(bool, tag = "1")]
    pub(crate) pre_start_required: bool,
    #[prost(bool, tag = "2")]
    pub(crate) get_preferred_allocation_available: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ListAndWatchResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) devices: Vec<Device>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Device {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
    #[prost(string, tag = "2")]
    pub(crate) health: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct AllocateRequest {
    #[prost(message, repeated, tag = "1")]
    pub(crate) container_requests: Vec<ContainerAllocateRequest>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerAllocateRequest {
    #[prost(string, repeated, tag = "1")]
    pub(crate) devices_ids: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct AllocateResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) container_responses: Vec<ContainerAllocateResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerAllocateResponse {
    #[prost(message, repeated, tag = "5")]
    pub(crate) cdi_devices: Vec<CdiDevice>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct CdiDevice {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PreferredAllocationRequest {
    #[prost(message, repeated, tag = "1")]
    pub(crate) container_requests: Vec<ContainerPreferredAllocationRequest>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerPreferredAllocationRequest {
    #[prost(string, repeated, tag = "1")]
    pub(crate) available: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub(crate) must_include: Vec<String>,
    #[prost(int32, tag = "3")]
    pub(crate) allocation_size: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PreferredAllocationResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) container_responses: Vec<ContainerPreferredAllocationResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerPreferredAllocationResponse {
    #[prost(string, repeated, tag = "1")]
    pub(crate) device_ids: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PreStartContainerRequest {
    #[prost(string, repeated, tag = "1")]
    pub(crate) devices_ids: Vec<String>,
}
