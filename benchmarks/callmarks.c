/* Marks of where counting begins and ends in a process under callgrind. Elsewhere the functions do nothing. */
#include <valgrind/callgrind.h>

void counting_on(void) { CALLGRIND_START_INSTRUMENTATION; }
void counting_off(void) { CALLGRIND_STOP_INSTRUMENTATION; }
