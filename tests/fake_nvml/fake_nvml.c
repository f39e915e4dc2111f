/* A small libnvidia-ml.so.1 that plays a machine described in a text file, so that the real pynvml is exercised.
 *
 * FAKE_NVML names the file. Each line is `key value`; `device` and `instance` begin a GPU and a MIG instance of it.
 * A value of the form `!n` means that the call returns NVML's error n. What is not described is not supported (3).
 * nvmlDeviceGetEnforcedPowerLimit is missing on purpose: an old driver lacks functions.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SUCCESS 0
#define INVALID 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define TOO_SMALL 7
#define MOST 16
#define MOST_PIDS 8

typedef struct {
    int error;
    unsigned long long value;
} Answer;

typedef struct Device {
    int parent; /* -1: a GPU */
    char uuid[96], name[96], pci[32], remote[32];
    Answer total, used, free, load, power, temperature, throttle, mig, gi, ci, pids, links;
    unsigned pid[MOST_PIDS];
    unsigned long long pid_used[MOST_PIDS];
} Device;

static Device devices[MOST];
static int count, init_error, missing_handle = -1;
static char driver[64];
static int cuda_version;
static char asked[1 << 14];

static void note(const char *call, const Device *device) {
    size_t length = strlen(asked);
    snprintf(asked + length, sizeof asked - length, "%s %d\n", call, (int)(device - devices));
}

/* What has been asked so far: one line for each call, with the device's number. */
const char *fake_nvml_asked(void) { return asked; }

static Answer parse(const char *text) {
    Answer answer = {0, 0};
    if (text[0] == '!') answer.error = atoi(text + 1);
    else answer.value = strtoull(text, NULL, 10);
    return answer;
}

static void load(void) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256], key[64];
    Device *device = NULL;
    int parent = -1;
    count = init_error = 0;
    if (!file) { init_error = 9; return; }
    while (fgets(line, sizeof line, file)) {
        int at = 0;
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "%63s %n", key, &at) != 1) continue;
        const char *value = line + at;
        if (!strcmp(key, "device") || !strcmp(key, "instance")) {
            if (count == MOST) break;
            if (key[0] == 'd') parent = count;
            device = &devices[count++];
            memset(device, 0, sizeof *device);
            device->parent = key[0] == 'd' ? -1 : parent;
            Answer none = {NOT_SUPPORTED, 0};
            device->total = device->used = device->free = device->load = device->power = none;
            device->temperature = device->throttle = device->mig = device->gi = device->ci = device->links = none;
        }
        else if (!strcmp(key, "init")) init_error = atoi(value);
        else if (!strcmp(key, "driver")) snprintf(driver, sizeof driver, "%s", value);
        else if (!strcmp(key, "cuda")) cuda_version = atoi(value);
        else if (!strcmp(key, "missing_handle")) missing_handle = atoi(value);
        else if (!device) continue;
        else if (!strcmp(key, "uuid")) snprintf(device->uuid, sizeof device->uuid, "%s", value);
        else if (!strcmp(key, "name")) snprintf(device->name, sizeof device->name, "%s", value);
        else if (!strcmp(key, "pci")) snprintf(device->pci, sizeof device->pci, "%s", value);
        else if (!strcmp(key, "remote")) snprintf(device->remote, sizeof device->remote, "%s", value);
        else if (!strcmp(key, "total")) device->total = parse(value);
        else if (!strcmp(key, "used")) device->used = parse(value);
        else if (!strcmp(key, "free")) device->free = parse(value);
        else if (!strcmp(key, "load")) device->load = parse(value);
        else if (!strcmp(key, "power")) device->power = parse(value);
        else if (!strcmp(key, "temperature")) device->temperature = parse(value);
        else if (!strcmp(key, "throttle")) device->throttle = parse(value);
        else if (!strcmp(key, "mig")) device->mig = parse(value);
        else if (!strcmp(key, "gi")) device->gi = parse(value);
        else if (!strcmp(key, "ci")) device->ci = parse(value);
        else if (!strcmp(key, "links")) device->links = parse(value);
        else if (!strcmp(key, "process") && device->pids.value < MOST_PIDS) {
            int i = (int)device->pids.value++;
            sscanf(value, "%u %llu", &device->pid[i], &device->pid_used[i]);
        }
    }
    fclose(file);
}

static int give(Answer answer, unsigned *to) {
    if (!answer.error) *to = (unsigned)answer.value;
    return answer.error;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; load(); return init_error; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake library"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "%s", driver); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = cuda_version; return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *n) {
    *n = 0;
    for (int i = 0; i < count; i++) *n += devices[i].parent < 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if ((int)index == missing_handle) return 15;
    for (int i = 0; i < count; i++)
        if (devices[i].parent < 0 && index-- == 0) { *device = &devices[i]; return SUCCESS; }
    return INVALID;
}

int nvmlDeviceGetUUID(Device *device, char *text, unsigned size) {
    snprintf(text, size, "%s", device->uuid);
    return SUCCESS;
}

int nvmlDeviceGetName(Device *device, char *text, unsigned size) {
    snprintf(text, size, "%s", device->name);
    return SUCCESS;
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} Pci;

int nvmlDeviceGetPciInfo_v3(Device *device, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%s", device->pci);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device *device, unsigned long long *memory) {
    note("memory", device);
    if (device->total.error) return device->total.error;
    memory[0] = device->total.value;
    memory[1] = device->free.value;
    memory[2] = device->used.value;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device *device, unsigned *rates) {
    note("load", device);
    rates[1] = 0;
    return give(device->load, rates);
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) { return give(device->power, milliwatts); }

int nvmlDeviceGetTemperature(Device *device, unsigned sensor, unsigned *degrees) {
    (void)sensor;
    return give(device->temperature, degrees);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *bits) {
    *bits = device->throttle.value;
    return device->throttle.error;
}

int nvmlDeviceGetMigMode(Device *device, unsigned *now, unsigned *pending) {
    *pending = (unsigned)device->mig.value;
    return give(device->mig, now);
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *n) { (void)device; *n = 7; return SUCCESS; }

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **instance) {
    for (int i = 0; i < count; i++)
        if (devices[i].parent == device - devices && index-- == 0) { *instance = &devices[i]; return SUCCESS; }
    return NOT_FOUND;
}

int nvmlDeviceGetGpuInstanceId(Device *device, unsigned *id) { return give(device->gi, id); }
int nvmlDeviceGetComputeInstanceId(Device *device, unsigned *id) { return give(device->ci, id); }

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gi, ci;
} Process;

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *n, Process *list) {
    unsigned room = *n;
    note("processes", device);
    *n = (unsigned)device->pids.value;
    if (*n == 0) return SUCCESS;
    if (!list || room < *n) return TOO_SMALL;
    for (unsigned i = 0; i < *n; i++) {
        memset(&list[i], 0, sizeof list[i]);
        list[i].pid = device->pid[i];
        list[i].used = device->pid_used[i];
    }
    return SUCCESS;
}

int nvmlDeviceGetTopologyCommonAncestor(Device *a, Device *b, int *level) { (void)a; (void)b; *level = 50; return SUCCESS; }

int nvmlDeviceGetP2PStatus(Device *a, Device *b, int what, int *status) {
    (void)what;
    *status = a->links.error || b->links.error ? 5 : 0;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(Device *device, unsigned link, unsigned *active) {
    if (device->links.error) return device->links.error;
    if (link >= device->links.value) return INVALID;
    *active = 1;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device *device, unsigned link, Pci *pci) {
    (void)link;
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%s", device->remote);
    return SUCCESS;
}
