/* A libnvidia-ml.so.1 for tests: two cards, one of them cut into MIG instances on demand.
 *
 * NVML_STUB_FAIL     "nvmlDeviceGetName=3,nvmlInitWithFlags=18": what these calls return instead of an answer
 * NVML_STUB_MIG      number of MIG instances of the second card
 * NVML_STUB_MEMORY   "total free" in bytes, of every card
 * NVML_STUB_NAME     name of every card, any bytes
 * Compiled with -DOLD it has only what the oldest drivers have. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int number; } Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;

static Device cards[2] = {{0}, {1}}, instances[7] = {{100}, {101}, {102}, {103}, {104}, {105}, {106}};

static int scripted(const char *call) {
    const char *list = getenv("NVML_STUB_FAIL"), *found;
    size_t length = strlen(call);
    for (found = list; found && (found = strstr(found, call)); found += length)
        if (found[length] == '=' && (found == list || found[-1] == ','))
            return atoi(found + length + 1);
    return 0;
}
#define SCRIPTED do { int code = scripted(__func__); if (code) return code; } while (0)

int nvmlInitWithFlags(unsigned int flags) { SCRIPTED; return 0; }
int nvmlShutdown(void) { SCRIPTED; return 0; }
const char *nvmlErrorString(int code) { return scripted(__func__) ? "\xff\xfe" : "an error that the stub was told to return"; }
int nvmlDeviceGetCount_v2(unsigned int *count) { SCRIPTED; *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **device) {
    SCRIPTED;
    if (index > 1) return 2;
    *device = &cards[index];
    return 0;
}
int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned int length) {
    SCRIPTED;
    if (device->number >= 100)
        snprintf(uuid, length, "MIG-aaaaaaaa-0000-0000-0000-00000000000%d", device->number - 100);
    else
        snprintf(uuid, length, "GPU-1234567%d-89ab-cdef-0123-456789abcdef", device->number);
    return 0;
}
int nvmlDeviceGetName(Device *device, char *name, unsigned int length) {
    SCRIPTED;
    const char *given = getenv("NVML_STUB_NAME");
    if (given) snprintf(name, length, "%s", given);
    else snprintf(name, length, "NVIDIA  Stub %d", device->number);
    return 0;
}
int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    SCRIPTED;
    const char *given = getenv("NVML_STUB_MEMORY");
    memory->total = device->number >= 100 ? 5000000000ULL : 24000000000ULL;
    memory->free = device->number >= 100 ? 4000000000ULL : 5000000000ULL;
    if (given) sscanf(given, "%llu %llu", &memory->total, &memory->free);
    memory->used = memory->total - memory->free;
    return 0;
}
#ifndef OLD
int nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    SCRIPTED;
    snprintf(version, length, "555.55.55");
    return 0;
}
int nvmlDeviceGetUtilizationRates(Device *device, Utilization *rates) {
    SCRIPTED;
    rates->gpu = 42;
    rates->memory = 7;
    return 0;
}
int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned int *celsius) { SCRIPTED; *celsius = 61; return 0; }
int nvmlDeviceGetPowerUsage(Device *device, unsigned int *milliwatts) { SCRIPTED; *milliwatts = 123400; return 0; }
int nvmlDeviceGetMigMode(Device *device, unsigned int *current, unsigned int *pending) {
    SCRIPTED;
    *current = *pending = device->number == 1 && getenv("NVML_STUB_MIG") != NULL;
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned int *count) { SCRIPTED; *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned int index, Device **instance) {
    SCRIPTED;
    if (index >= (unsigned int)atoi(getenv("NVML_STUB_MIG"))) return 6;
    *instance = &instances[index];
    return 0;
}
#endif
