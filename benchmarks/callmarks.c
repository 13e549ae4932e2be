/* Where counting begins and ends, for a process under callgrind; nothing elsewhere. */
#include <valgrind/callgrind.h>

void counting_on(void) { CALLGRIND_START_INSTRUMENTATION; }
void counting_off(void) { CALLGRIND_STOP_INSTRUMENTATION; }
