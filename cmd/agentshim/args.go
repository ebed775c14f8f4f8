package main

import (
	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/harness"
)

// arguments are the words of a command line that are none of agentshim's flags.
type arguments struct {
	// before are those in front of "--": options of the harness and words. after are those
	// behind it, whatever they look like.
	before, after []string
}

// takeHarnessArgs makes cmd take options of the harness beside its own flags, in any order
// and with one dash or two, as orchestrators write them. What they are is known only
// with the harness file, so cobra's parser, which has to know, gets agentshim's own alone.
func takeHarnessArgs(cmd *cobra.Command, run func(*cobra.Command, arguments) error) {
	cmd.DisableFlagParsing = true
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		own, given := splitArguments(cmd, args)
		cmd.DisableFlagParsing = false
		if err := cmd.ParseFlags(own); err != nil {
			return err
		}
		if help, _ := cmd.Flags().GetBool("help"); help {
			return cmd.Help()
		}
		// The one of the first call had no flags yet.
		if err := cmd.Root().PersistentPreRunE(cmd, nil); err != nil {
			return err
		}
		return run(cmd, given)
	}
}

// splitArguments tells agentshim's own flags, as cobra takes them, from the rest. A flag is
// agentshim's where it has one of that name, max_x and max-x alike.
func splitArguments(cmd *cobra.Command, args []string) (own []string, given arguments) {
	for i := 0; i < len(args); i++ {
		if args[i] == "--" {
			given.after = args[i+1:]
			return own, given
		}
		name, value, hasValue, ok := harness.OptionArgument(args[i])
		if name == "h" {
			name = "help"
		}
		flag := cmd.Flag(name)
		switch {
		case !ok || flag == nil:
			given.before = append(given.before, args[i])
		case hasValue:
			own = append(own, "--"+name+"="+value)
		case flag.NoOptDefVal != "" || i+1 == len(args):
			own = append(own, "--"+name)
		default:
			i++
			own = append(own, "--"+name+"="+args[i])
		}
	}
	return own, given
}

// words are all of them, for a verb that knows no options of the harness.
func (a arguments) words() ([]string, error) {
	for _, arg := range a.before {
		if _, _, _, option := harness.OptionArgument(arg); option {
			return nil, invalid("unknown flag: %s", "agentshim exec --help lists them; a program's own go behind --", arg)
		}
	}
	return append(a.before, a.after...), nil
}
