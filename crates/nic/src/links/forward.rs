//! Methods of [`Link`](super::Link) that a wrapping link forwards to the inner one, by group.

/// `forward!(self => self.inner; identity, services);` writes the methods of these groups.
macro_rules! forward {
    ($self:ident => $to:expr; $($group:ident),+) => {
        $(forward!(@$group $self, $to);)+
    };
    (@identity $self:ident, $to:expr) => {
        fn local(&$self) -> std::net::IpAddr {
            ($to).local()
        }

        fn slot(&$self) -> u8 {
            ($to).slot()
        }

        fn receive_room(&$self) -> u64 {
            ($to).receive_room()
        }

        fn capabilities(&$self) -> $crate::links::Capabilities {
            ($to).capabilities()
        }
    };
    (@opening $self:ident, $to:expr) => {
        fn listen(&mut $self) -> Result<(), $crate::links::OpenError> {
            ($to).listen()
        }
    };
    (@same_host $self:ident, $to:expr) => {
        fn departed(&mut $self) -> Option<$crate::links::Departed> {
            ($to).departed()
        }

        fn fallbacks(&$self) -> Vec<String> {
            ($to).fallbacks()
        }

        fn shut_down(&mut $self) {
            ($to).shut_down();
        }

        fn wake_peers(&mut $self) {
            ($to).wake_peers();
        }

        fn poll_control(&mut $self) {
            ($to).poll_control();
        }

        fn control_fd(&$self) -> Option<std::os::fd::RawFd> {
            ($to).control_fd()
        }

        fn doorbells(&$self) -> Option<std::sync::Arc<dyn $crate::links::Doorbells>> {
            ($to).doorbells()
        }
    };
    (@services $self:ident, $to:expr) => {
        fn bind_service(&mut $self, service: u64) -> std::io::Result<bool> {
            ($to).bind_service(service)
        }

        fn unbind_service(&mut $self, service: u64) {
            ($to).unbind_service(service);
        }

        fn has_service(&$self, service: u64) -> bool {
            ($to).has_service(service)
        }

        fn hand_over_mad(
            &mut $self,
            owner: $crate::links::MadOwner,
            datagram: &$crate::links::RxDatagram<'_>,
        ) -> bool {
            ($to).hand_over_mad(owner, datagram)
        }

        fn join_group(&mut $self, group: std::net::IpAddr) -> std::io::Result<()> {
            ($to).join_group(group)
        }

        fn leave_group(&mut $self, group: std::net::IpAddr) {
            ($to).leave_group(group);
        }
    };
    (@waiting $self:ident, $to:expr) => {
        fn wake_fds(&$self) -> Vec<std::os::fd::RawFd> {
            ($to).wake_fds()
        }

        fn send_blocked(&$self) -> bool {
            ($to).send_blocked()
        }
    };
}
