package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

func manCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "man DIRECTORY",
		Short:   "Write man pages",
		Long:    "Write a man page for each command into a directory, which is made if need be.",
		Example: `  ratelimit man ~/.local/share/man/man1`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return badInput{err}
			}
			root := cmd.Root()
			root.DisableAutoGenTag = true // the same pages each time
			err := doc.GenManTree(root, &doc.GenManHeader{Title: "RATELIMIT", Section: "1", Source: version(), Manual: "ratelimit"}, args[0])
			if err != nil {
				return fmt.Errorf("write man pages: %w", err)
			}
			return nil
		},
	}
}
