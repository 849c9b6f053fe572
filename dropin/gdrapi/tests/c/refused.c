/* The driver maps nothing: pinning fails with the errno that says so, and the program goes on. */
#include "gdr.h"

int main(void) {
    load_gdr("libgdrapi.so.2");
    void *driver = load_cuda();
    void (*refuse)(int) = (void (*)(int))dlsym(driver, "fake_cuda_refuse_dmabuf_mmap");
    CHECK(refuse);
    refuse(1);
    gdr_t g = gdr_open();
    CHECK(g);
    struct memory memory = allocate(GPU_PAGE);
    gdr_mh_t mh = {0};
    GIVES(ENOTSUP, gdr_pin_buffer(g, memory.at, GPU_PAGE, 0, 0, &mh));
    GIVES(ENOTSUP, gdr_pin_buffer(g, memory.at, GPU_PAGE, 0, 0, &mh));
    CHECK(!mh.h);
    GIVES(0, gdr_close(g));
    return 0;
}
