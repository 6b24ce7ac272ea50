/* A libnvidia-ml.so.1 that knows the GPUs of a text file, read anew at each nvmlInit:
 *   init CODE                         what nvmlInit returns
 *   gpu UUID MODEL DIVIDED            the next GPU; DIVIDED is 1 in MIG mode, 0 or -1 (not supported)
 *   mig GPU UUID INSTANCE COMPUTE     an instance of GPU number GPU
 *   process UUID PID BYTES KIND       KIND is c(ompute) or g(raphics); BYTES -1: not available
 *   refuse UUID CODE                  what asking for the processes of that device returns
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };
enum { MAX = 32 };

typedef struct { char uuid[96], model[64]; int divided, parent, gi, ci, refuse; } Device;
typedef struct { char uuid[96], kind; unsigned pid; long long bytes; } Process;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gi, ci; } ProcessInfo;

static Device devices[MAX];
static Process processes[MAX];
static int num_devices, num_processes, open_sessions;

static Device *by_uuid(const char *uuid) {
    for (int i = 0; i < num_devices; i++)
        if (!strcmp(devices[i].uuid, uuid)) return &devices[i];
    return NULL;
}

static Device *nth_gpu(unsigned n) {
    for (int i = 0; i < num_devices; i++)
        if (devices[i].parent < 0 && n-- == 0) return &devices[i];
    return NULL;
}

int nvmlInitWithFlags(unsigned flags) {
    FILE *file = fopen(getenv("NVML_STUB_GPUS"), "r");
    char line[256], uuid[96], model[64], kind;
    int a, b, c, code = SUCCESS;
    long long bytes;
    if (!file) return UNINITIALIZED;
    num_devices = num_processes = 0;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "init %d", &a) == 1) code = a;
        else if (sscanf(line, "gpu %95s %63s %d", uuid, model, &a) == 3) {
            Device *d = &devices[num_devices++];
            *d = (Device){.divided = a, .parent = -1};
            strcpy(d->uuid, uuid), strcpy(d->model, model);
        } else if (sscanf(line, "mig %d %95s %d %d", &a, uuid, &b, &c) == 4) {
            Device *d = &devices[num_devices++];
            *d = (Device){.divided = -1, .parent = a, .gi = b, .ci = c};
            strcpy(d->uuid, uuid);
        } else if (sscanf(line, "process %95s %d %lld %c", uuid, &a, &bytes, &kind) == 4) {
            Process *p = &processes[num_processes++];
            p->pid = a, p->bytes = bytes, p->kind = kind;
            strcpy(p->uuid, uuid);
        } else if (sscanf(line, "refuse %95s %d", uuid, &a) == 2) by_uuid(uuid)->refuse = a;
    }
    fclose(file);
    if (code == SUCCESS) open_sessions++;
    return code;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return open_sessions-- > 0 ? SUCCESS : UNINITIALIZED; }
int stub_open_sessions(void) { return open_sessions; }
const char *nvmlErrorString(int code) { return code ? "an error of the stub" : "success"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 0;
    while (nth_gpu(*count)) ++*count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    return (*device = nth_gpu(index)) ? SUCCESS : INVALID;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    return (*device = by_uuid(uuid)) ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned size) {
    return snprintf(uuid, size, "%s", device->uuid), SUCCESS;
}

int nvmlDeviceGetName(Device *device, char *name, unsigned size) {
    return snprintf(name, size, "%s", device->model), SUCCESS;
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    if (device->divided < 0) return NOT_SUPPORTED;
    return *current = *pending = device->divided, SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) { return *count = 7, SUCCESS; }

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **instance) {
    int number = 0;
    while (nth_gpu(number) != device) number++;
    for (int i = 0; i < num_devices; i++)
        if (devices[i].parent == number && index-- == 0) return *instance = &devices[i], SUCCESS;
    return NOT_FOUND;
}

int nvmlDeviceGetGpuInstanceId(Device *device, unsigned *id) { return *id = device->gi, SUCCESS; }
int nvmlDeviceGetComputeInstanceId(Device *device, unsigned *id) { return *id = device->ci, SUCCESS; }

static int list(Device *device, unsigned *count, ProcessInfo *infos, char kind) {
    unsigned found = 0;
    if (device->refuse) return device->refuse;
    for (int i = 0; i < num_processes; i++)
        if (!strcmp(processes[i].uuid, device->uuid) && processes[i].kind == kind) {
            if (infos && found < *count)
                infos[found] = (ProcessInfo){processes[i].pid, (unsigned long long)processes[i].bytes};
            found++;
        }
    int fits = found <= *count;
    *count = found;
    return fits ? SUCCESS : TOO_SMALL;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *count, ProcessInfo *infos) {
    return list(d, count, infos, 'c');
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *d, unsigned *count, ProcessInfo *infos) {
    return d->parent < 0 ? list(d, count, infos, 'g') : NOT_SUPPORTED;
}
