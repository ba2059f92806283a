// SPDX-License-Identifier: Apache-2.0

// A libnvidia-ml.so.1 whose driver is a server behind a socket, for tests and for cohdi-sim.
//
// It answers as the real library does where that matters to somebody who hot-plugs GPUs:
//  - Init and Shutdown are counted; the set of GPUs is taken at the first Init. A GPU that comes later is
//    unseen until nvmlDeviceDiscoverGpus or until everybody has shut down.
//  - A GPU in drain state is invisible to whoever initialises after it was drained.
//  - A handle belongs to one GPU. Once that GPU has gone it answers NVML_ERROR_GPU_IS_LOST for ever, also
//    when another GPU sits at the same address.
//  - Whoever takes a handle holds the GPU's device node open until Shutdown or until the GPU is removed.
//  - Persistence mode counts as use: it must be off before draining or removing.
//  - A set of events that has a lost GPU in it answers NVML_ERROR_GPU_IS_LOST once it is read empty, whatever
//    else is in it.
//
// The driver is the unix socket nvml.sock in this library's own directory: no socket, no driver. A request
// is one line, an answer is lines up to a single "."; a call hangs for as long as the server does not
// answer. No lock is held meanwhile, as the real library does not serialise GPUs against each other.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#pragma GCC visibility push(default)
#include "nvml.h"
#pragma GCC visibility pop

enum { MAX_GPUS = 64, MAX_PROCS = 256, MAX_LINE = 1024, MAX_IDLE = 4 };

// gpu is what the driver says of one GPU.
struct gpu {
	char pci[32], uuid[NVML_DEVICE_UUID_BUFFER_SIZE];
	char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE], serial[NVML_DEVICE_SERIAL_BUFFER_SIZE];
	unsigned domain, bus, device;
	unsigned minor, arch, pci_device, persistence, drain, mig;
	unsigned long long memory;
};

// slot is what a handle points to: one GPU from the moment it was seen. Slots are never freed, so that a
// handle of a GPU that has gone can still be answered.
struct slot {
	char pci[32], uuid[NVML_DEVICE_UUID_BUFFER_SIZE];
	unsigned domain, bus, device;
	int lost, fd;
	struct slot *next;
};

struct driver {
	char version[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE], nvml[NVML_SYSTEM_NVML_VERSION_BUFFER_SIZE];
	int cuda;
	struct gpu gpu[MAX_GPUS];
	unsigned count;
};

struct nvmlEventSet_st {
	int fd;
	size_t used;
	char buf[MAX_LINE];
	struct { struct slot *slot; unsigned long long types; } member[MAX_GPUS];
	unsigned members;
};

// state guards everything below it.
static pthread_mutex_t state = PTHREAD_MUTEX_INITIALIZER;
static unsigned inits;
static struct slot *slots;
static struct slot *view[MAX_GPUS]; // by PCI address: the order of NVML's indices
static unsigned viewed;
static int idle[MAX_IDLE]; // connections without a request under way
static unsigned idles;

// ---- the driver behind the socket

static int dial(void)
{
	struct sockaddr_un to = {.sun_family = AF_UNIX};
	Dl_info self;
	char dir[4096], *slash;
	int fd, dirfd;

	if (!dladdr((void *)dial, &self) || !self.dli_fname || strlen(self.dli_fname) >= sizeof dir)
		return -1;
	strcpy(dir, self.dli_fname);
	slash = strrchr(dir, '/');
	strcpy(slash ? slash : dir, slash ? "" : ".");

	// By way of a descriptor: the directory's name may not fit in sun_path.
	dirfd = open(*dir ? dir : "/", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (dirfd < 0)
		return -1;
	snprintf(to.sun_path, sizeof to.sun_path, "/proc/self/fd/%d/nvml.sock", dirfd);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof to) < 0) {
		close(fd);
		fd = -1;
	}
	close(dirfd);
	return fd;
}

static int take_idle(void)
{
	int fd = -1;
	pthread_mutex_lock(&state);
	if (idles)
		fd = idle[--idles];
	pthread_mutex_unlock(&state);
	return fd;
}

static void give_idle(int fd)
{
	pthread_mutex_lock(&state);
	if (inits && idles < MAX_IDLE) {
		idle[idles++] = fd;
		fd = -1;
	}
	pthread_mutex_unlock(&state);
	if (fd >= 0)
		close(fd);
}

typedef void line_fn(char *line, void *into);

// exchange sends a request and hands the answer's lines to fn. It returns -1 if the server closed the
// connection before it answered anything.
static int exchange(int fd, const char *request, line_fn *fn, void *into, nvmlReturn_t *ret)
{
	char buf[MAX_LINE];
	size_t used = 0, sent = 0, length = strlen(request);
	int any = 0;

	*ret = NVML_SUCCESS;
	while (sent < length) {
		ssize_t n = send(fd, request + sent, length - sent, MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -1;
		sent += (size_t)n;
	}
	for (;;) {
		char *end;
		while ((end = memchr(buf, '\n', used))) {
			size_t line = (size_t)(end - buf) + 1;
			*end = 0;
			if (!strcmp(buf, "."))
				return 0;
			if (!strncmp(buf, "err ", 4))
				*ret = (nvmlReturn_t)atoi(buf + 4);
			else if (fn && strcmp(buf, "ok"))
				fn(buf, into);
			memmove(buf, buf + line, used -= line);
		}
		if (used == sizeof buf) {
			*ret = NVML_ERROR_UNKNOWN;
			return 1;
		}
		ssize_t n = read(fd, buf + used, sizeof buf - used);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0) {
			*ret = NVML_ERROR_UNKNOWN;
			return any ? 1 : -1;
		}
		any = 1;
		used += (size_t)n;
	}
}

// ask makes one request. Only one that changes nothing goes over a connection that was used before: it can
// be repeated if the server was restarted meanwhile.
static nvmlReturn_t ask(int reads, line_fn *fn, void *into, const char *format, ...)
{
	char request[256];
	nvmlReturn_t ret;
	va_list args;
	int fd, rc;

	va_start(args, format);
	vsnprintf(request, sizeof request, format, args);
	va_end(args);

	if (reads && (fd = take_idle()) >= 0) {
		rc = exchange(fd, request, fn, into, &ret);
		if (rc == 0)
			give_idle(fd);
		else
			close(fd);
		if (rc >= 0)
			return ret;
	}
	fd = dial();
	if (fd < 0)
		return NVML_ERROR_DRIVER_NOT_LOADED;
	rc = exchange(fd, request, fn, into, &ret);
	if (rc == 0)
		give_idle(fd);
	else
		close(fd);
	return ret;
}

// field finds the value of key in a line of TAB-separated key=value, and ends it there.
static const char *field(const char *line, const char *key, char *value, size_t size)
{
	size_t length = strlen(key);
	value[0] = 0;
	for (const char *at = line; at; at = strchr(at, '\t')) {
		at += *at == '\t';
		if (!strncmp(at, key, length) && at[length] == '=') {
			at += length + 1;
			size_t n = strcspn(at, "\t");
			snprintf(value, size, "%.*s", (int)n, at);
			return value;
		}
	}
	return value;
}

static unsigned number(const char *line, const char *key)
{
	char value[32];
	return (unsigned)strtoul(field(line, key, value, sizeof value), NULL, 0);
}

static unsigned architecture(const char *name)
{
	static const struct { const char *name; unsigned arch; } known[] = {
		{"kepler", NVML_DEVICE_ARCH_KEPLER}, {"maxwell", NVML_DEVICE_ARCH_MAXWELL},
		{"pascal", NVML_DEVICE_ARCH_PASCAL}, {"volta", NVML_DEVICE_ARCH_VOLTA},
		{"turing", NVML_DEVICE_ARCH_TURING}, {"ampere", NVML_DEVICE_ARCH_AMPERE},
		{"ada", NVML_DEVICE_ARCH_ADA}, {"ada lovelace", NVML_DEVICE_ARCH_ADA},
		{"hopper", NVML_DEVICE_ARCH_HOPPER}, {"blackwell", NVML_DEVICE_ARCH_BLACKWELL},
		{"rubin", NVML_DEVICE_ARCH_RUBIN},
	};
	if (*name >= '0' && *name <= '9')
		return (unsigned)strtoul(name, NULL, 10);
	for (size_t i = 0; i < sizeof known / sizeof *known; i++)
		if (!strcasecmp(name, known[i].name))
			return known[i].arch;
	return NVML_DEVICE_ARCH_UNKNOWN;
}

static int parse_pci(const char *text, unsigned *domain, unsigned *bus, unsigned *device)
{
	unsigned function;
	char rest;
	*domain = 0;
	if (sscanf(text, "%x:%x:%x.%x%c", domain, bus, device, &function, &rest) == 4)
		return 1;
	if (sscanf(text, "%x:%x:%x%c", domain, bus, device, &rest) == 3)
		return 1;
	*domain = 0;
	return sscanf(text, "%x:%x.%x%c", bus, device, &function, &rest) == 3;
}

static void on_list(char *line, void *into)
{
	struct driver *d = into;
	char value[64];

	if (!strncmp(line, "driver\t", 7)) {
		field(line, "version", d->version, sizeof d->version);
		field(line, "nvml", d->nvml, sizeof d->nvml);
		d->cuda = (int)number(line, "cuda");
		return;
	}
	if (d->count == MAX_GPUS)
		return;
	struct gpu *g = &d->gpu[d->count];
	field(line, "pci", g->pci, sizeof g->pci);
	if (!parse_pci(g->pci, &g->domain, &g->bus, &g->device))
		return;
	field(line, "uuid", g->uuid, sizeof g->uuid);
	field(line, "name", g->name, sizeof g->name);
	field(line, "serial", g->serial, sizeof g->serial);
	g->memory = strtoull(field(line, "memory", value, sizeof value), NULL, 10);
	g->arch = architecture(field(line, "arch", value, sizeof value));
	g->pci_device = (unsigned)strtoul(field(line, "device", value, sizeof value), NULL, 16);
	if (!g->pci_device)
		g->pci_device = 0x2330;
	g->minor = number(line, "minor");
	g->persistence = number(line, "persistence");
	g->drain = number(line, "drain");
	g->mig = number(line, "mig");
	d->count++;
}

static nvmlReturn_t list(struct driver *d)
{
	memset(d, 0, sizeof *d);
	return ask(1, on_list, d, "list\n");
}

// ---- what this process sees of it

static int order(const void *a, const void *b)
{
	const struct slot *x = *(struct slot *const *)a, *y = *(struct slot *const *)b;
	if (x->domain != y->domain)
		return x->domain < y->domain ? -1 : 1;
	if (x->bus != y->bus)
		return x->bus < y->bus ? -1 : 1;
	return (x->device > y->device) - (x->device < y->device);
}

static void lose(struct slot *s)
{
	s->lost = 1;
	if (s->fd >= 0)
		close(s->fd);
	s->fd = -1;
}

// look makes the view anew: the GPUs of d seen before, and those that a newcomer may see.
static void look(const struct driver *d)
{
	struct slot *now[MAX_GPUS];
	unsigned n = 0;
	for (unsigned i = 0; i < d->count; i++) {
		const struct gpu *g = &d->gpu[i];
		struct slot *s = NULL;
		for (unsigned j = 0; j < viewed && !s; j++)
			if (!view[j]->lost && !strcmp(view[j]->pci, g->pci) && !strcmp(view[j]->uuid, g->uuid))
				s = view[j];
		if (!s) {
			if (g->drain || !(s = calloc(1, sizeof *s)))
				continue;
			snprintf(s->pci, sizeof s->pci, "%s", g->pci);
			snprintf(s->uuid, sizeof s->uuid, "%s", g->uuid);
			s->domain = g->domain, s->bus = g->bus, s->device = g->device;
			s->fd = -1;
			s->next = slots;
			slots = s;
		}
		now[n++] = s;
	}
	for (unsigned i = 0; i < viewed; i++) {
		unsigned j = 0;
		while (j < n && now[j] != view[i])
			j++;
		if (j == n)
			lose(view[i]);
	}
	memcpy(view, now, n * sizeof *view);
	viewed = n;
	qsort(view, viewed, sizeof *view, order);
}

static int ready(void)
{
	pthread_mutex_lock(&state);
	int yes = inits > 0;
	pthread_mutex_unlock(&state);
	return yes;
}

// find checks a handle and returns what the driver says of its GPU. The handle is the caller's: it may be
// anything.
static nvmlReturn_t find(nvmlDevice_t device, struct driver *d, struct gpu **g)
{
	struct slot *s;
	int lost;

	pthread_mutex_lock(&state);
	for (s = slots; s && s != (struct slot *)device.handle; s = s->next)
		;
	lost = s && s->lost;
	int up = inits > 0;
	pthread_mutex_unlock(&state);
	if (!up)
		return NVML_ERROR_UNINITIALIZED;
	if (!s)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (lost)
		return NVML_ERROR_GPU_IS_LOST;

	nvmlReturn_t ret = list(d);
	if (ret != NVML_SUCCESS)
		return ret;
	for (unsigned i = 0; i < d->count; i++)
		if (!strcmp(d->gpu[i].pci, s->pci) && !strcmp(d->gpu[i].uuid, s->uuid)) {
			*g = &d->gpu[i];
			return NVML_SUCCESS;
		}
	// Its device node stays open until Shutdown: nobody told this process to let go.
	pthread_mutex_lock(&state);
	s->lost = 1;
	pthread_mutex_unlock(&state);
	return NVML_ERROR_GPU_IS_LOST;
}

// hold gives out a handle: from now on this process has the GPU's node open.
static nvmlReturn_t hold(struct slot *s, nvmlDevice_t *device)
{
	struct driver d;
	struct gpu *g;
	char node[32];
	nvmlDevice_t h = {.handle = (struct nvmlDevice_st *)s};

	nvmlReturn_t ret = find(h, &d, &g);
	if (ret != NVML_SUCCESS)
		return ret;
	snprintf(node, sizeof node, "/dev/nvidia%u", g->minor);
	pthread_mutex_lock(&state);
	if (s->fd < 0 && !s->lost)
		s->fd = open(node, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
	pthread_mutex_unlock(&state);
	*device = h;
	return NVML_SUCCESS;
}

static nvmlReturn_t copy(char *to, unsigned size, const char *from)
{
	if (!to)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (strlen(from) >= size)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(to, from);
	return NVML_SUCCESS;
}

// ---- the library's functions

nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
	struct driver d;
	int first;
	(void)flags;

	do {
		if ((first = !ready())) {
			nvmlReturn_t ret = list(&d);
			if (ret != NVML_SUCCESS)
				return ret;
		}
		pthread_mutex_lock(&state);
		if (inits > 0 || first) {
			if (inits++ == 0)
				look(&d);
			first = 1;
		}
		pthread_mutex_unlock(&state);
	} while (!first);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlInit(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void)
{
	nvmlReturn_t ret = NVML_SUCCESS;
	pthread_mutex_lock(&state);
	if (inits == 0) {
		ret = NVML_ERROR_UNINITIALIZED;
	} else if (--inits == 0) {
		for (struct slot *s = slots; s; s = s->next)
			lose(s);
		viewed = 0;
		while (idles)
			close(idle[--idles]);
	}
	pthread_mutex_unlock(&state);
	return ret;
}

const char *nvmlErrorString(nvmlReturn_t ret)
{
	switch (ret) {
	case NVML_SUCCESS: return "The operation was successful";
	case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
	case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
	case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
	case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
	case NVML_ERROR_NOT_FOUND: return "Not Found";
	case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
	case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
	case NVML_ERROR_TIMEOUT: return "Timeout";
	case NVML_ERROR_LIBRARY_NOT_FOUND: return "NVML Shared Library Not Found";
	case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
	case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
	case NVML_ERROR_IN_USE: return "In use by another client";
	default: return "Unknown Error";
	}
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length)
{
	struct driver d;
	if (!ready())
		return NVML_ERROR_UNINITIALIZED;
	nvmlReturn_t ret = list(&d);
	return ret == NVML_SUCCESS ? copy(version, length, d.version) : ret;
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
	struct driver d;
	nvmlReturn_t ret = list(&d);
	return ret == NVML_SUCCESS ? copy(version, length, d.nvml) : ret;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
	struct driver d;
	if (!version)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t ret = list(&d);
	*version = d.cuda;
	return ret;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
	if (!count)
		return NVML_ERROR_INVALID_ARGUMENT;
	pthread_mutex_lock(&state);
	nvmlReturn_t ret = inits ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
	*count = viewed;
	pthread_mutex_unlock(&state);
	return ret;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
	if (!ready())
		return NVML_ERROR_UNINITIALIZED;
	if (!device)
		return NVML_ERROR_INVALID_ARGUMENT;
	pthread_mutex_lock(&state);
	struct slot *s = index < viewed ? view[index] : NULL;
	pthread_mutex_unlock(&state);
	return s ? hold(s, device) : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device)
{
	return nvmlDeviceGetHandleByIndex_v2(index, device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	struct slot *s = NULL;
	if (!ready())
		return NVML_ERROR_UNINITIALIZED;
	if (!uuid || !device)
		return NVML_ERROR_INVALID_ARGUMENT;
	pthread_mutex_lock(&state);
	for (unsigned i = 0; i < viewed; i++)
		if (!strcmp(view[i]->uuid, uuid))
			s = view[i];
	pthread_mutex_unlock(&state);
	return s ? hold(s, device) : NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *device)
{
	struct slot *s = NULL;
	unsigned domain, bus, dev;
	if (!ready())
		return NVML_ERROR_UNINITIALIZED;
	if (!id || !device || !parse_pci(id, &domain, &bus, &dev))
		return NVML_ERROR_INVALID_ARGUMENT;
	pthread_mutex_lock(&state);
	for (unsigned i = 0; i < viewed; i++)
		if (view[i]->domain == domain && view[i]->bus == bus && view[i]->device == dev)
			s = view[i];
	pthread_mutex_unlock(&state);
	return s ? hold(s, device) : NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *id, nvmlDevice_t *device)
{
	return nvmlDeviceGetHandleByPciBusId_v2(id, device);
}

// FIND stands at the head of every function on a handle: d is what the driver says, g this GPU in it.
#define FIND(ok)                                             \
	struct driver d;                                     \
	struct gpu *g = NULL;                                \
	nvmlReturn_t ret = find(device, &d, &g);       \
	if (ret != NVML_SUCCESS)                             \
		return ret;                                  \
	if (!(ok))                                           \
		return NVML_ERROR_INVALID_ARGUMENT

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length)
{
	FIND(uuid);
	return copy(uuid, length, g->uuid);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length)
{
	FIND(name);
	return copy(name, length, g->name);
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned length)
{
	FIND(serial);
	return *g->serial ? copy(serial, length, g->serial) : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor)
{
	FIND(minor);
	*minor = g->minor;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
	FIND(index);
	ret = NVML_ERROR_NOT_FOUND;
	pthread_mutex_lock(&state);
	for (unsigned i = 0; i < viewed; i++)
		if (view[i] == (struct slot *)device.handle) {
			*index = i;
			ret = NVML_SUCCESS;
		}
	pthread_mutex_unlock(&state);
	return ret;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	FIND(pci);
	memset(pci, 0, sizeof *pci);
	pci->domain = g->domain;
	pci->bus = g->bus;
	pci->device = g->device;
	pci->pciDeviceId = g->pci_device << 16 | 0x10de;
	pci->pciSubSystemId = pci->pciDeviceId;
	snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", g->domain & 0xffff, g->bus & 0xff, g->device & 0x1f);
	snprintf(pci->busId, sizeof pci->busId, NVML_DEVICE_PCI_BUS_ID_FMT, NVML_DEVICE_PCI_BUS_ID_FMT_ARGS(pci));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci) { return nvmlDeviceGetPciInfo_v3(device, pci); }
nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci) { return nvmlDeviceGetPciInfo_v3(device, pci); }

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	FIND(memory);
	*memory = (nvmlMemory_t){.total = g->memory, .free = g->memory};
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, nvmlDeviceArchitecture_t *arch)
{
	FIND(arch);
	*arch = g->arch;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	static const struct { unsigned arch; int major, minor; } table[] = {
		{NVML_DEVICE_ARCH_KEPLER, 3, 7}, {NVML_DEVICE_ARCH_MAXWELL, 5, 2}, {NVML_DEVICE_ARCH_PASCAL, 6, 0},
		{NVML_DEVICE_ARCH_VOLTA, 7, 0}, {NVML_DEVICE_ARCH_TURING, 7, 5}, {NVML_DEVICE_ARCH_AMPERE, 8, 0},
		{NVML_DEVICE_ARCH_ADA, 8, 9}, {NVML_DEVICE_ARCH_HOPPER, 9, 0}, {NVML_DEVICE_ARCH_BLACKWELL, 10, 0},
	};
	FIND(major && minor);
	for (size_t i = 0; i < sizeof table / sizeof *table; i++)
		if (table[i].arch == g->arch) {
			*major = table[i].major;
			*minor = table[i].minor;
			return NVML_SUCCESS;
		}
	return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *brand)
{
	FIND(brand);
	*brand = NVML_BRAND_NVIDIA;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
	FIND(mode);
	*mode = g->persistence ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
	FIND(mode == NVML_FEATURE_ENABLED || mode == NVML_FEATURE_DISABLED);
	return ask(0, NULL, NULL, "persistence %s %d\n", g->pci, mode == NVML_FEATURE_ENABLED);
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
	FIND(current && pending);
	if (g->arch < NVML_DEVICE_ARCH_AMPERE || g->arch == NVML_DEVICE_ARCH_ADA)
		return NVML_ERROR_NOT_SUPPORTED;
	*current = *pending = g->mig ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *mig)
{
	FIND(mig);
	*mig = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count)
{
	FIND(count);
	*count = g->mig ? 7 : 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig)
{
	FIND(mig);
	return index < 7 ? NVML_ERROR_NOT_FOUND : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, nvmlEnableState_t *active)
{
	FIND(active && link < NVML_NVLINK_MAX_LINKS);
	return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetMultiGpuBoard(nvmlDevice_t device, unsigned *multi)
{
	FIND(multi);
	*multi = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBoardId(nvmlDevice_t device, unsigned *board)
{
	FIND(board);
	*board = g->domain << 16 | g->bus << 8 | g->device << 3;
	return NVML_SUCCESS;
}

// ---- processes

struct procs {
	struct { unsigned pid; unsigned long long used; } proc[MAX_PROCS];
	unsigned count;
};

static void on_proc(char *line, void *into)
{
	struct procs *p = into;
	char used[32];
	if (strncmp(line, "proc\t", 5) || p->count == MAX_PROCS)
		return;
	p->proc[p->count].pid = number(line, "pid");
	p->proc[p->count++].used = strtoull(field(line, "used", used, sizeof used), NULL, 10);
}

static nvmlReturn_t processes(nvmlDevice_t device, unsigned *count, const void *infos, struct procs *p)
{
	unsigned room;
	FIND(count && (infos || !*count));
	memset(p, 0, sizeof *p);
	ret = ask(1, on_proc, p, "procs %s\n", g->pci);
	if (ret != NVML_SUCCESS)
		return ret;
	room = *count;
	*count = p->count;
	return p->count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#ifdef VARIANT_OLD
typedef nvmlProcessInfo_v2_t process_info;
#define PROCESSES_COMPUTE nvmlDeviceGetComputeRunningProcesses_v2
#define PROCESSES_GRAPHICS nvmlDeviceGetGraphicsRunningProcesses_v2
#else
typedef nvmlProcessInfo_t process_info;
#define PROCESSES_COMPUTE nvmlDeviceGetComputeRunningProcesses_v3
#define PROCESSES_GRAPHICS nvmlDeviceGetGraphicsRunningProcesses_v3
#endif

nvmlReturn_t PROCESSES_COMPUTE(nvmlDevice_t device, unsigned *count, process_info *infos)
{
	struct procs p;
	nvmlReturn_t ret = processes(device, count, infos, &p);
	for (unsigned i = 0; ret == NVML_SUCCESS && i < p.count; i++)
		infos[i] = (process_info){p.proc[i].pid, p.proc[i].used, 0xffffffff, 0xffffffff};
	return ret;
}

nvmlReturn_t PROCESSES_GRAPHICS(nvmlDevice_t device, unsigned *count, process_info *infos)
{
	(void)infos;
	FIND(count);
	*count = 0;
	return NVML_SUCCESS;
}

// ---- health events

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
	static const char request[] = "events\n";
	if (!ready())
		return NVML_ERROR_UNINITIALIZED;
	if (!set)
		return NVML_ERROR_INVALID_ARGUMENT;
	set->handle = calloc(1, sizeof *set->handle);
	if (!set->handle)
		return NVML_ERROR_MEMORY;
	set->handle->fd = dial();
	if (set->handle->fd < 0 || send(set->handle->fd, request, sizeof request - 1, MSG_NOSIGNAL) < 0) {
		nvmlEventSetFree(*set);
		set->handle = NULL;
		return NVML_ERROR_UNKNOWN;
	}
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
	if (!set.handle)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (set.handle->fd >= 0)
		close(set.handle->fd);
	free(set.handle);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
	FIND(types);
	*types = nvmlEventTypeXidCriticalError;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
	struct nvmlEventSet_st *members = set.handle;
	FIND(members && members->members < MAX_GPUS);
	if (types & ~(unsigned long long)nvmlEventTypeXidCriticalError)
		return NVML_ERROR_NOT_SUPPORTED;
	members->member[members->members].slot = (struct slot *)device.handle;
	members->member[members->members++].types = types;
	return NVML_SUCCESS;
}

// event takes one line off the set's buffer: 1 if it is an event of a member.
static int event(struct nvmlEventSet_st *set, nvmlEventData_t *data)
{
	char line[MAX_LINE], pci[32], *end = memchr(set->buf, '\n', set->used);
	if (!end)
		return 0;
	*end = 0;
	strcpy(line, set->buf);
	size_t length = (size_t)(end - set->buf) + 1;
	memmove(set->buf, set->buf + length, set->used -= length);
	if (strncmp(line, "xid\t", 4))
		return -1;
	field(line, "pci", pci, sizeof pci);
	for (unsigned i = 0; i < set->members; i++)
		if (set->member[i].types && !strcmp(set->member[i].slot->pci, pci)) {
			*data = (nvmlEventData_t){
				.device = {.handle = (struct nvmlDevice_st *)set->member[i].slot},
				.eventType = nvmlEventTypeXidCriticalError,
				.eventData = number(line, "code"),
				.gpuInstanceId = 0xffffffff,
				.computeInstanceId = 0xffffffff,
			};
			return 1;
		}
	return -1;
}

// nothing is the answer of a set without an event.
static nvmlReturn_t nothing(const struct nvmlEventSet_st *set)
{
	int lost = 0;
	pthread_mutex_lock(&state);
	for (unsigned i = 0; i < set->members; i++)
		lost |= set->member[i].slot->lost;
	pthread_mutex_unlock(&state);
	return lost ? NVML_ERROR_GPU_IS_LOST : NVML_ERROR_TIMEOUT;
}

static long long now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t events, nvmlEventData_t *data, unsigned timeout)
{
	struct nvmlEventSet_st *set = events.handle;
	if (!ready())
		return NVML_ERROR_UNINITIALIZED;
	if (!set || !data)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (long long until = now_ms() + timeout;;) {
		int got = event(set, data);
		if (got > 0)
			return NVML_SUCCESS;
		if (got < 0)
			continue;
		if (set->used == sizeof set->buf)
			return NVML_ERROR_UNKNOWN;
		long long left = until - now_ms();
		struct pollfd p = {.fd = set->fd, .events = POLLIN};
		int n = poll(&p, 1, left > 0 ? (int)left : 0);
		if (n == 0 || (n < 0 && errno == EINTR))
			return nothing(set);
		ssize_t r = n < 0 ? -1 : read(set->fd, set->buf + set->used, sizeof set->buf - set->used);
		if (r <= 0)
			return NVML_ERROR_UNKNOWN;
		set->used += (size_t)r;
	}
}

nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout)
{
	return nvmlEventSetWait_v2(set, data, timeout);
}

// ---- what a library of an old driver does not have

#ifndef VARIANT_OLD

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	FIND(memory);
	if (memory->version != nvmlMemory_v2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	*memory = (nvmlMemory_v2_t){.version = nvmlMemory_v2, .total = g->memory, .free = g->memory};
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t device, nvmlDeviceAddressingMode_t *mode)
{
	FIND(mode);
	if (mode->version != nvmlDeviceAddressingMode_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	mode->value = NVML_DEVICE_ADDRESSING_MODE_NONE;
	return NVML_SUCCESS;
}

// at finds the GPU at an address, seen by this process or not: the drain calls take no handle.
static nvmlReturn_t at(const nvmlPciInfo_t *pci, struct driver *d, struct gpu **g)
{
	if (!ready())
		return NVML_ERROR_UNINITIALIZED;
	if (!pci)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t ret = list(d);
	for (unsigned i = 0; ret == NVML_SUCCESS && i < d->count; i++)
		if (d->gpu[i].domain == pci->domain && d->gpu[i].bus == pci->bus && d->gpu[i].device == pci->device) {
			*g = &d->gpu[i];
			return NVML_SUCCESS;
		}
	return ret == NVML_SUCCESS ? NVML_ERROR_INVALID_ARGUMENT : ret;
}

nvmlReturn_t nvmlDeviceModifyDrainState(nvmlPciInfo_t *pci, nvmlEnableState_t on)
{
	struct driver d;
	struct gpu *g;
	nvmlReturn_t ret = at(pci, &d, &g);
	if (ret != NVML_SUCCESS)
		return ret;
	if (on == NVML_FEATURE_ENABLED && g->persistence)
		return NVML_ERROR_IN_USE;
	return ask(0, NULL, NULL, "drain %s %d\n", g->pci, on == NVML_FEATURE_ENABLED);
}

nvmlReturn_t nvmlDeviceQueryDrainState(nvmlPciInfo_t *pci, nvmlEnableState_t *on)
{
	struct driver d;
	struct gpu *g;
	if (!on)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t ret = at(pci, &d, &g);
	if (ret == NVML_SUCCESS)
		*on = g->drain ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return ret;
}

nvmlReturn_t nvmlDeviceRemoveGpu_v2(nvmlPciInfo_t *pci, nvmlDetachGpuState_t gpu, nvmlPcieLinkState_t link)
{
	struct driver d;
	struct gpu *g;
	(void)gpu, (void)link;
	nvmlReturn_t ret = at(pci, &d, &g);
	if (ret != NVML_SUCCESS)
		return ret;
	if (g->persistence)
		return NVML_ERROR_IN_USE;
	ret = ask(0, NULL, NULL, "remove %s\n", g->pci);
	if (ret != NVML_SUCCESS)
		return ret;
	pthread_mutex_lock(&state);
	for (unsigned i = 0; i < viewed; i++)
		if (view[i]->domain == g->domain && view[i]->bus == g->bus && view[i]->device == g->device) {
			lose(view[i]);
			memmove(view + i, view + i + 1, (--viewed - i) * sizeof *view);
			break;
		}
	pthread_mutex_unlock(&state);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceDiscoverGpus(nvmlPciInfo_t *pci)
{
	struct driver d;
	if (!ready())
		return NVML_ERROR_UNINITIALIZED;
	if (!pci)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t ret = ask(0, NULL, NULL, "discover\n");
	if (ret == NVML_SUCCESS)
		ret = list(&d);
	if (ret != NVML_SUCCESS)
		return ret;
	pthread_mutex_lock(&state);
	look(&d);
	pthread_mutex_unlock(&state);
	return NVML_SUCCESS;
}

#endif
