#include <stdio.h>

int which(int), cuWhich(int);

int main(void) {
    printf("%d %d\n", which(0), cuWhich(0));
    return 0;
}
