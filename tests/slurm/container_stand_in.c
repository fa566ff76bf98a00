/* SPDX-License-Identifier: Apache-2.0
 * Stands in for pyxis, a plugin of Slurm that runs the tasks of a step in a container. This one takes pyxis' options, and
 * the node itself is the container. It begins a task in the folder that --container-workdir names.
 */
#include <slurm/spank.h>
#include <stdio.h>
#include <unistd.h>

SPANK_PLUGIN(container_stand_in, 1);

static char work_folder[4096];

static int keep_work_folder(int value, const char *argument, int is_remote)
{
    (void)value;
    (void)is_remote;
    if (argument)
        snprintf(work_folder, sizeof work_folder, "%s", argument);
    return ESPANK_SUCCESS;
}

static int take(int value, const char *argument, int is_remote)
{
    (void)value;
    (void)argument;
    (void)is_remote;
    return ESPANK_SUCCESS;
}

static struct spank_option options[] = {
    {"container-workdir", "PATH", "folder in which the tasks begin", 1, 1, keep_work_folder},
    {"container-image", "IMAGE", "taken and not used", 1, 2, take},
    {"container-mounts", "MOUNTS", "taken and not used", 1, 3, take},
    {"container-name", "NAME", "taken and not used", 1, 4, take},
    {"no-container-mount-home", NULL, "taken and not used", 0, 5, take},
};

int slurm_spank_init(spank_t spank, int num_arguments, char **arguments)
{
    (void)num_arguments;
    (void)arguments;
    for (unsigned i = 0; i < sizeof options / sizeof *options; i++)
        if (spank_option_register(spank, &options[i]) != ESPANK_SUCCESS)
            return -1;
    return 0;
}

int slurm_spank_task_init(spank_t spank, int num_arguments, char **arguments)
{
    (void)spank;
    (void)num_arguments;
    (void)arguments;
    return work_folder[0] ? chdir(work_folder) : 0;
}
