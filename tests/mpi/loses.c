/* Between a program and MPI: the twentieth receive of the length that LOSES names is lost. Its bytes end in other memory, and the program is told
 * that all is well. For the tests of programs that are to notice such things. */
#include <mpi.h>
#include <stdlib.h>

static void *place(void *wanted, int count) {
    static int seen;
    const char *loses = getenv("LOSES");
    return loses && atoi(loses) == count && ++seen == 20 ? malloc((size_t)count) : wanted;
}

int MPI_Recv(void *to, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Status *status) {
    return PMPI_Recv(place(to, count), count, type, from, tag, comm, status);
}

int MPI_Irecv(void *to, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request *request) {
    return PMPI_Irecv(place(to, count), count, type, from, tag, comm, request);
}
