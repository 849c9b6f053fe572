//! The public symbols, with the symbol versions of rdma-core 65.
//!
//! Rust does not support symbol versioning. So each symbol is a jump to the function, in assembly,
//! with a `.symver` directive; the linker knows the versions from `nodes.map`.

use std::ffi::CStr;

use crate::{
    ah, async_event, attributes, channel, context, cq, device_list, dm, import, kernel, mr, multicast, pd,
    port, qp, qp_ex, qp_modify, rates, report, srq, strings, sysfs, system, unsupported, view,
};

/// `$name@@$node` is `$function`. One that is `about` an object is the system's, if the object, its
/// first argument, is.
macro_rules! export {
    ($node:literal: $($($about:ident)? @ $name:ident = $function:path),* $(,)?) => {
        $(export!(one $node, $($about)? @ $name = $function);)*
    };
    (one $node:literal, @ $name:ident = $function:path) => {
        symbol!(
            concat!("nobounce_", stringify!($name)),
            concat!(stringify!($name), "@@", $node),
            $function
        );
    };
    (one $node:literal, about @ $name:ident = $function:path) => {
        unsafe extern "C-unwind" fn $name(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> usize {
            const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => c"",
            };
            if let Some(result) = system::forward(NAME, [a, b, c, d, e, f]) {
                return result;
            }
            // SAFETY: all our functions may be called so (see `Any`), with the program's own
            // arguments.
            unsafe {
                let function = std::mem::transmute::<*const (), system::Any>($function as *const ());
                function(a, b, c, d, e, f)
            }
        }
        export!(one $node, @ $name = $name);
    };
}

/// One versioned symbol that jumps to a function.
macro_rules! symbol {
    ($label:expr, $versioned:expr, $function:path) => {
        core::arch::global_asm!(
            ".pushsection .text.nobounce_export,\"ax\",@progbits",
            concat!(".globl ", $label),
            concat!(".type ", $label, ",@function"),
            concat!($label, ":"),
            $crate::export::jump!(),
            concat!(".size ", $label, ", .-", $label),
            concat!(".symver ", $label, ", ", $versioned),
            ".popsection",
            function = sym $function
        );
    };
}

/// The jump, in the language of this processor.
#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "jmp {function}"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "b {function}"
    };
}

pub(crate) use {jump, symbol};

export!("IBVERBS_1.0":
    @ibv_copy_path_rec_from_kern = kernel::copy_path_from,
    @ibv_copy_path_rec_to_kern = kernel::copy_path_to,
    @ibv_copy_qp_attr_from_kern = kernel::copy_qp_attr,
    about @ibv_create_comp_channel = channel::create_comp_channel,
    about @ibv_destroy_comp_channel = channel::destroy_comp_channel,
    @ibv_get_sysfs_path = sysfs::get_sysfs_path,
    @ibv_rate_to_mult = rates::rate_to_mult,
    @ibv_read_sysfs_file = sysfs::read_sysfs_file,
    @mult_to_ibv_rate = rates::mult_to_rate,
);

export!("IBVERBS_1.1":
    @ibv_ack_async_event = async_event::ack_async_event,
    about @ibv_ack_cq_events = channel::ack_cq_events,
    about @ibv_alloc_pd = pd::alloc_pd,
    about @ibv_attach_mcast = multicast::attach_mcast,
    about @ibv_close_device = context::close_device,
    @ibv_copy_ah_attr_from_kern = kernel::copy_ah_attr,
    about @ibv_create_ah = ah::create_ah,
    about @ibv_create_ah_from_wc = ah::create_ah_from_wc,
    about @ibv_create_cq = cq::create_cq,
    about @ibv_create_qp = qp::create_qp,
    about @ibv_create_srq = srq::create_srq,
    about @ibv_dealloc_pd = pd::dealloc_pd,
    about @ibv_dereg_mr = mr::dereg_mr,
    about @ibv_destroy_ah = ah::destroy_ah,
    about @ibv_destroy_cq = cq::destroy_cq,
    about @ibv_destroy_qp = qp::destroy_qp,
    about @ibv_destroy_srq = srq::destroy_srq,
    about @ibv_detach_mcast = multicast::detach_mcast,
    @ibv_dofork_range = system::dofork_range,
    @ibv_dontfork_range = system::dontfork_range,
    @ibv_event_type_str = strings::event_type_str,
    @ibv_fork_init = system::fork_init,
    @ibv_free_device_list = device_list::free_device_list,
    about @ibv_get_async_event = async_event::get_async_event,
    about @ibv_get_cq_event = channel::get_cq_event,
    about @ibv_get_device_guid = device_list::get_device_guid,
    @ibv_get_device_list = device_list::get_device_list,
    @ibv_get_device_name = device_list::get_device_name,
    about @ibv_init_ah_from_wc = ah::init_ah_from_wc,
    about @ibv_modify_qp = qp_modify::modify_qp,
    about @ibv_modify_srq = srq::modify_srq,
    @ibv_node_type_str = strings::node_type_str,
    about @ibv_open_device = context::open_device,
    @ibv_port_state_str = strings::port_state_str,
    about @ibv_query_device = attributes::query_device,
    about @ibv_query_gid = port::query_gid,
    about @ibv_query_pkey = port::query_pkey,
    about @ibv_query_port = port::query_port,
    about @ibv_query_qp = qp_modify::query_qp,
    about @ibv_query_srq = srq::query_srq,
    @ibv_rate_to_mbps = rates::rate_to_mbps,
    about @ibv_reg_mr = mr::reg_mr,
    @ibv_register_driver = unsupported::nothing,
    about @ibv_rereg_mr = mr::rereg_mr,
    about @ibv_resize_cq = cq::resize_cq,
    about @ibv_resolve_eth_l2_from_gid = ah::resolve_eth_l2_from_gid,
    @ibv_wc_status_str = strings::wc_status_str,
    @mbps_to_ibv_rate = rates::mbps_to_rate,
);

// A symbol of this library only: a program that wants it looks it up by name.
export!("NOBOUNCE_1.0": @nobounce_report = report::report, @nobounce_view = view::view);
export!("IBVERBS_1.5": about @ibv_get_pkey_index = port::get_pkey_index);
export!("IBVERBS_1.6": about @ibv_qp_to_qp_ex = qp_ex::qp_to_qp_ex);
export!("IBVERBS_1.7": about @ibv_reg_mr_iova = mr::reg_mr_iova);
export!("IBVERBS_1.8": about @ibv_reg_mr_iova2 = mr::reg_mr_iova2);
export!("IBVERBS_1.9": about @ibv_get_device_index = device_list::get_device_index);
export!("IBVERBS_1.10":
    @ibv_import_device = import::import_device,
    about @ibv_import_mr = import::import_mr,
    about @ibv_import_pd = import::import_pd,
    about @ibv_query_ece = unsupported::code,
    about @ibv_set_ece = unsupported::code,
    about @ibv_unimport_mr = import::unimport_mr,
    about @ibv_unimport_pd = import::unimport_pd,
);
export!("IBVERBS_1.11":
    about @_ibv_query_gid_ex = port::query_gid_ex,
    about @_ibv_query_gid_table = port::query_gid_table,
);
export!("IBVERBS_1.12": about @ibv_reg_dmabuf_mr = mr::reg_dmabuf_mr);
export!("IBVERBS_1.13":
    about @ibv_import_dm = dm::import_dm,
    @ibv_is_fork_initialized = system::is_fork_initialized,
    about @ibv_unimport_dm = dm::unimport_dm,
);
export!("IBVERBS_1.14": about @ibv_query_qp_data_in_order = qp_modify::query_qp_data_in_order);
export!("IBVERBS_1.15":
    about @ibv_alloc_dmah = unsupported::pointer,
    about @ibv_dealloc_dmah = unsupported::code,
    about @ibv_reg_mr_ex = mr::reg_mr_ex,
);
export!("IBVERBS_1.16":
    about @ibv_dm_export_dmabuf_fd = unsupported::minus_one,
    about @ibv_query_port_speed = port::query_port_speed,
);
export!("IBVERBS_1.17":
    about @ibv_alloc_buf = unsupported::pointer,
    about @ibv_free_buf = unsupported::nothing,
    about @ibv_reg_buf_mr = unsupported::pointer,
);
export!("IBVERBS_1.18":
    about @_ibv_query_comp_cntr_caps = unsupported::code,
    about @ibv_create_comp_cntr = unsupported::pointer,
    about @ibv_destroy_comp_cntr = unsupported::code,
    about @ibv_export_buf_dmabuf_fd = unsupported::minus_one,
    about @ibv_inc_comp_cntr = unsupported::code,
    about @ibv_inc_err_comp_cntr = unsupported::code,
    about @ibv_qp_attach_comp_cntr = unsupported::code,
    about @ibv_read_comp_cntr = unsupported::code,
    about @ibv_read_err_comp_cntr = unsupported::code,
    about @ibv_set_comp_cntr = unsupported::code,
    about @ibv_set_err_comp_cntr = unsupported::code,
);
